"""The step on asynchronous streams: nothing may depend on what only happens to be done in time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from llmq.runtime.device import HOST_SPEC
from tests.runtime.fake_comm import connect_streams, link_kinds
from tests.runtime.fake_streams import PATIENCE, StreamDevice
from tests.runtime.races import Races
from tests.sharded import (
    DELAYED,
    FP8,
    Session,
    assert_same_run,
    model,
    move_in_pieces,
    random_options,
    run,
)

STREAMED = {"shard_weights": True, "shard_gradients": True}
OFFLOADED = ("master", "gradients", "residual", "between")
HOST = {f"offload_{name}": True for name in OFFLOADED}
MOMENTS = {"offload_opt_m": True, "offload_opt_v": True}
EVERYTHING = STREAMED | HOST | MOMENTS
QUANTS = {"persistent_quants": True, "offload_quants": True}
GATHER = {"memcpy_all_gather": True}
A2A = {"all_to_all_reduce": True}
COPIES = GATHER | A2A | {"memcpy_send_recv": True}
MIRRORS = {"mirror_weights": True}
HEAD = {"head_dtype": "e4m3"}
# o has none, so that one half adds to the stream itself.
ADAPTERS = {"lora_rank": 3, "lora_dropout": 0.2, "lora_targets": "q,v,up,down", "train": ("norms",)}
NF4, E4M3 = {"base_dtype": "nf4"}, {"base_dtype": "e4m3"}
MODEL = model("tiny-qwen3", vocab_size=96, tied_embeddings=False)
GPU = replace(HOST_SPEC, name="streams")  # so that it has memory for copies

# Only masters and codes of the update's work are in host memory.
CODES = STREAMED | QUANTS | {"offload_master": True, "offload_quants": True}

# Ranks, micro-steps, options.
CASES = {
    "one rank": (1, 2, EVERYTHING),
    "one rank, quants": (1, 3, FP8 | EVERYTHING | QUANTS),
    "one rank, codes": (1, 2, FP8 | CODES | {"offload_gradients": True}),
    "one rank, gradients": (1, 2, {"shard_gradients": True} | HOST | {"offload_master": False}),
    "copies, everything": (2, 2, COPIES | EVERYTHING),
    "copies, everything, fp8": (3, 2, COPIES | EVERYTHING | DELAYED | HEAD),
    "copies, recompute": (2, 1, COPIES | FP8 | {"recompute_block": True, "keep_transposed": False}),
    "copies, mirrors, fp8": (2, 2, COPIES | FP8 | STREAMED | MIRRORS | {"persistent_quants": True}),
    "nccl, fp8": (2, 2, FP8 | {"shard_gradients": True} | MOMENTS),
    "nccl, everything": (3, 2, EVERYTHING | DELAYED),
    "nccl, codes": (2, 2, FP8 | CODES),
    "gathers by copies": (2, 2, GATHER | FP8 | STREAMED | QUANTS),
    "exchanges by nccl": (2, 1, GATHER | A2A | EVERYTHING | FP8 | QUANTS),
    "one rank, adapters": (1, 2, ADAPTERS | STREAMED | HOST | MOMENTS),
    "copies, adapters": (2, 2, COPIES | ADAPTERS),
    "one rank, nf4": (1, 2, ADAPTERS | NF4 | {"offload_residual": True}),
    "one rank, nf4, host": (1, 1, ADAPTERS | NF4 | FP8 | STREAMED | HOST),
    "copies, nf4": (2, 2, COPIES | ADAPTERS | NF4 | {"shard_weights": True} | MIRRORS),
    "copies, e4m3": (2, 1, COPIES | ADAPTERS | E4M3 | DELAYED | {"shard_weights": True} | MIRRORS),
    "one rank, int8": (1, 1, ADAPTERS | {"base_dtype": "int8"} | {"keep_transposed": False}),
    "nccl, e4m3": (2, 2, ADAPTERS | E4M3 | FP8 | {"recompute_block": True}),
    "exchanges by copies": (2, 2, A2A | {"memcpy_send_recv": True} | STREAMED),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr("llmq.comm.options.STAGING_CHUNK", 4096)
    move_in_pieces(monkeypatch, 2048)


def program(session: Session) -> list:
    """Steps enqueued ahead of their results; evaluations after updates and again. Graphs are run
    three times: as they are, captured, and again."""
    step, evaluate = session.step, session.evaluate
    tickets = [session.train(i) for i in range(2)]
    results = [step.result(ticket) for ticket in tickets]
    results += [evaluate(), evaluate(1001)]
    results.append(step.result(session.train(2)))
    return [*results, evaluate()]


@cache
def wanted(name: str):
    """The results of the CPU device, one call after another."""
    world, accum, options = CASES[name]
    return run(world, accum, program, of=MODEL, **options)


def on_streams(
    world, accum, options, *, program=program, links="mixed", make=StreamDevice, **device
):
    """Run it on streams; the outcome."""
    races = Races()
    make = partial(make, races=races, **device)
    connect = partial(connect_streams, kinds=link_kinds(world, links))
    device = {"make": make, "spec": GPU, "connect": connect}
    outcome = run(world, accum, program, of=MODEL, **device, **options)
    assert not races.found, "\n".join(sorted(set(races.found)))
    return outcome


@pytest.mark.parametrize("name", CASES)
def test_step(name):
    """In graphs, the work of which is enqueued piece by piece the first time; so are all of two
    random cases."""
    world, accum, options = CASES[name]
    got = on_streams(world, accum, options, graphs=True, pause=1e-4)
    assert_same_run(got, wanted(name))


def test_slabs_of_one_piece(monkeypatch):
    """Small models have such slabs: then pieces hold up next to nothing."""
    move_in_pieces(monkeypatch, 1 << 20)
    name = "nccl, codes"
    world, accum, options = CASES[name]
    assert_same_run(on_streams(world, accum, options, pause=1e-4), wanted(name))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_options(seed):
    world, accum, base, options = random_options(seed)
    options |= base
    links = ("peer", "mixed", "staged")[seed % 3]
    got = on_streams(world, accum, options, links=links, graphs=seed % 2 == 0, pause=1e-4)
    assert_same_run(got, run(world, accum, program, of=MODEL, **options))


@pytest.mark.parametrize("name", ["copies, everything", "nccl, codes"])
def test_weights_that_are_made_anew_while_steps_are_enqueued(name):
    """Nobody has to wait: what peers do with a rank's memory is over when its own streams are."""
    world, accum, options = CASES[name]

    def again(session: Session) -> list:
        step, tickets = session.step, [session.train(0)]
        step.weights.init(MODEL, seed=2)
        tickets.append(session.train(1))
        step.weights.load(lambda param: np.full(param.shape, 0.01, np.float32))
        tickets.append(session.train(2))
        return [step.result(ticket) for ticket in tickets]

    got = on_streams(world, accum, options, program=again, pause=1e-4)
    assert_same_run(got, run(world, accum, again, of=MODEL, **options))


def copied(session: Session) -> list:
    """Steps beside which the state is copied, for a checkpoint that is written meanwhile."""
    step, dev = session.step, session.dev
    results = [step.result(session.train(i)) for i in range(2)]
    pieces = [piece for of_group in step.stored_state().values() for piece in of_group]
    expected = [dev.download(piece.tensor).tobytes() for piece in pieces]
    step.snapshot.take()
    tickets = [session.train(i) for i in (2, 3)]
    results += [step.result(ticket) for ticket in tickets]
    copies = [piece for of_group in step.snapshot.copy.values() for piece in of_group]
    dev.synchronize()
    assert [piece.tensor.numpy().tobytes() for piece in copies] == expected
    assert [dev.download(piece.tensor).tobytes() for piece in pieces] != expected
    return results


@pytest.mark.parametrize("name", ["one rank, quants", "copies, everything"])
def test_updates_wait_for_a_copy_of_the_state(name, monkeypatch):
    monkeypatch.setattr("llmq.state.pieces.COPIED", 4096)
    world, accum, options = CASES[name]
    on_streams(world, accum, options | {"ckpt_background": True}, program=copied, pause=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_steps_of_more_micro_steps_than_slots(monkeypatch, world):
    """The host waits before it writes what the device has not taken yet."""
    wanted = run(world, 3, program, of=MODEL)
    monkeypatch.setattr("llmq.model.rings.MOST_SLOTS", 2)
    assert_same_run(on_streams(world, 3, {}, pause=1e-4), wanted)


class Unclocked(StreamDevice):
    """Finds what main learns of other ranks by events that are waited for while no clock runs."""

    def _wait(self, event):
        if self.stream_name == "main" and self.clock is not None:
            self.enqueue(lambda: partial(self._look, event.mark))
        super()._wait(event)

    def _look(self, mark):
        assert mark is None or mark.reached.wait(PATIENCE)
        if mark is not None and self.races.news(self.queue_id("main"), mark.told):
            self.races.found.append(f"rank {self.rank}: no clock measures this wait")


@pytest.mark.parametrize("name", ["copies, mirrors, fp8", "nccl, fp8"])
def test_the_clock_measures_all_waits_for_other_ranks(name):
    world, accum, options = CASES[name]
    on_streams(world, accum, options, make=Unclocked)


def test_graphs_are_captured_once():
    """One for each kind of micro-step, however many steps there are."""
    keys = []

    def counting(session: Session) -> list:
        results = program(session)
        if session.dev.mesh.rank == 0:
            keys.append(session.dev.graphs)
        return results

    on_streams(2, 3, COPIES | FP8, program=counting)
    (graphs,) = keys
    micro_steps = {key[1:] for key in graphs if key[0] == "micro_step"}
    # To add, last, first after an update; step 3 comes after evaluations.
    first, middle, last = (False, False, True), (True, False, False), (True, True, False)
    assert micro_steps == {first, middle, last, (False, False, False)}
    others = {key for key in graphs if key[0] != "micro_step"}
    assert others == {
        ("update", "update"),
        ("combine",),
        ("evaluate", True, True),
        ("evaluate", False, True),
    }
    assert all(graphs["micro_step", *key] is not None for key in (first, middle, last))
