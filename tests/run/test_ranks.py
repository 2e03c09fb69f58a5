"""Trainers of several ranks: numbers of one rank, checkpoints for any number, failures."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llmq
from llmq.base.dtypes import BF16
from llmq.base.errors import LlmqError
from llmq.checkpoint.checkpoint import write_group
from llmq.checkpoint.hf import HfWeights
from llmq.comm.collectives import SingleComm
from llmq.data.loader import DataLoader
from llmq.model.step import Step
from llmq.run.ranks import Rank, Ranks
from llmq.runtime.host_device import HostDevice
from llmq.runtime.machine import Machine
from llmq.state.params import weight_table
from llmq.state.weights import Weights
from tests.runs import VOCAB, B, T, make_workplace, options, write_tokens

MICRO_BATCHES = 12  # of all ranks in a step


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    # Enough for steps of 12 batches of B sequences, in one file.
    write_tokens(Path("data/long.bin"), 60)


def trainer(world=1, **changes):
    defaults = {
        "gpus": world,
        "grad_accumulation": MICRO_BATCHES // world,
        "steps": 10,
        "train_file": "data/long.bin",
    }
    given = options(**{**defaults, **changes})
    given = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    return llmq.Trainer(**given)


def batches(seed=0, count=MICRO_BATCHES):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        inputs, targets = (rng.integers(0, VOCAB, (B, T)).astype(np.int32) for _ in range(2))
        targets[rng.random((B, T)) < 0.2] = -100
        made.append((inputs, targets))
    return made


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name, strict=True)


def assert_close(results, others):
    """Losses and norms of two runs whose sums are in another order."""
    for ours, theirs in zip(results, others, strict=True):
        assert ours.tokens == theirs.tokens
        # F32 sums in another order: 1e-6 in the first step, and a little more in each later one.
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=2e-6)
        np.testing.assert_allclose(ours.norm, theirs.norm, rtol=1e-5)
        np.testing.assert_allclose(*(r.numbers["lse_max"] for r in (ours, theirs)), rtol=1e-5)


# -- the numbers ---------------------------------------------------------------------------------

ONE: dict = {}


def one_rank():
    """Three steps of a single rank: results, gradients of the last step, weights."""
    if not ONE:
        with trainer() as t:
            ONE["results"] = [t.step(batches(seed)) for seed in range(3)]
            ONE["gradients"], ONE["weights"] = t.gradients(), t.weights()
    return ONE


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero_level": 2},
        {"zero_level": 3},
        {"zero_level": 3, "all_to_all_reduce": True, "memcpy_send_recv": True,
         "memcpy_all_gather": True, "offload_master": True, "offload_opt_m": True},
    ],
    ids=["zero1", "zero2", "zero3", "copies"],
)  # fmt: skip
def test_ranks_compute_what_one_rank_with_more_micro_steps_does(world, changes):
    with trainer(world, **changes) as t:
        results = [t.step(batches(seed)) for seed in range(3)]
        assert t.usage == t.plan.usage
        gradients, weights = t.gradients(), t.weights()
    one = one_rank()
    assert_close(results, one["results"])
    for name, expected in one["gradients"].items():
        # F32 sums in another order, of gradients that cancel to small ones.
        error = np.linalg.norm(gradients[name] - expected)
        assert error <= 1e-4 * np.linalg.norm(expected) + 1e-6, name
        # AdamW divides by the root of v: where a gradient nearly cancels, its rounding decides.
        np.testing.assert_allclose(weights[name], one["weights"][name], atol=2e-3, err_msg=name)
    assert any(array.any() for array in gradients.values())


def test_a_step_from_files_has_the_same_sequences_on_any_number_of_ranks():
    results = {}
    for world in (1, 2, 4):
        with trainer(world) as t:
            assert (t.steps_per_epoch, t.plan.tokens) == (3, MICRO_BATCHES * B * T)
            results[world] = [t.step() for _ in range(7)]  # into the third epoch
            assert {loader.epoch for loader in t.train_loaders} == {2}
    for world in (2, 4):
        assert_close(results[world], results[1])


def test_validation_is_the_mean_over_all_ranks():
    """Means over ranks that do not have equally many sequences."""
    count = 13
    write_tokens(Path("data/eval.bin"), count, seed=99)
    with trainer() as t:
        whole = t.validate()
    for world in (2, 3):
        with trainer(world) as t:
            assert t.eval_loader.batches_per_epoch == -(-count // (B * world))
            again, part = t.validate(), t.validate(1)
            assert again.tokens == whole.tokens == count * T
            np.testing.assert_allclose(again.loss, whole.loss, rtol=1e-6)  # another order
            assert part.tokens == min(world * B, count) * T


def test_wrong_number_of_batches():
    with trainer(3) as t, pytest.raises(ValueError, match="is 4 for each of 3 ranks, got 4"):
        t.step(batches(count=4))


def test_less_data_than_a_batch_of_all_ranks():
    write_tokens(Path("data/short.bin"), 5)
    results = {}
    for world in (1, 3):
        with trainer(world, train_file="data/short.bin") as t:
            assert t.steps_per_epoch == 1
            results[world] = [t.step() for _ in range(2)]
        assert [result.tokens for result in results[world]] == [5 * T] * 2
    assert_close(results[3], results[1])


# -- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"model_dtype": "bf16", "zero_level": 3, "master_dtype": "fp32", "opt_m_dtype": "e4m3",
         "opt_v_dtype": "e4m3", "offload_opt_v": True},
        {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_recipe": "delayed"},
    ],
    ids=["8-bit", "delayed"],
)  # fmt: skip
def test_four_ranks_are_continued_by_three_and_by_one(changes):
    with trainer(4, **changes) as t:
        t.step()
        path = t.save()
        assert len(list(path.iterdir())) == 4 * len(t._step.state()) + 1
        weights, data = t.weights(), t.train_loader.state()
        after = [t.step() for _ in range(3)]
    with trainer(4, **changes) as t:
        t.load(path)
        assert t.steps_done == 1
        assert [t.step() for _ in range(3)] == after, "the same to the bit"
    for world in (3, 1):
        with trainer(world, **changes) as t:
            t.load(path)
            assert_same(t.weights(), weights)
            assert t.train_loader.state() == data
            again = [t.step() for _ in range(3)]
            if t.config.model_dtype == "fp32":
                assert_close(again, after)
            for ours, theirs, norms in zip(again, after, (0.01, 0.01, 0.03), strict=True):
                # BF16 sums: 0.4 % apart in each element, with random numbers of each rank, and
                # what two more steps make of that. Other sequences are 1e-3 apart.
                np.testing.assert_allclose(ours.loss, theirs.loss, rtol=2e-4)
                # Norms of the third step are several times as far apart as those before it.
                np.testing.assert_allclose(ours.norm, theirs.norm, rtol=norms)


def test_going_back_in_a_trainer_that_goes_on(tmp_path):
    """Loading waits for peers that still read the weights; all weights are others afterwards."""
    with trainer(3, model_dtype="bf16", matmul_dtype="e4m3", zero_level=3) as t:
        path = t.save(tmp_path)
        first = [t.step(batches(seed)) for seed in range(3)]
        t.load(path)
        t.load(path)
        assert [t.step(batches(seed)) for seed in range(3)] == first


def test_the_export_of_ranks_is_that_of_one(capsys):
    with trainer(3, zero_level=3, model_dtype="bf16") as t:
        t.step()
        path, weights = t.save(), t.weights()
        t.export("from-ranks")
    with trainer(1, zero_level=3, model_dtype="bf16") as t:
        t.load(path)
        assert_same(t.weights(), weights)
        t.export("from-one")
    name = "model.safetensors"
    assert Path("from-ranks", name).read_bytes() == Path("from-one", name).read_bytes()
    with trainer(2, model="from-one", from_scratch=False, model_dtype="bf16") as t:
        assert_same(t.weights(), weights)
    with HfWeights(Path("from-ranks")) as files:
        files.check(weight_table(t.model))
    assert next(iter(weights.values())).dtype == BF16.numpy


def test_only_one_parameter_is_in_memory_while_a_model_is_exported(monkeypatch):
    live = []
    real = Ranks.read_param

    def read_param(self, group, param, **how):
        array = real(self, group, param, **how)
        live.append(array.nbytes)
        return array

    monkeypatch.setattr(Ranks, "read_param", read_param)
    with trainer(2) as t:
        t.export("out")
        params = [p for slab in t._step.table for p in slab.params]
    assert len(live) == len(params)
    assert max(live) == 4 * max(param.size for param in params)


def test_other_options_than_the_checkpoints_are_said(capsys):
    with trainer(2) as t:
        t.step()
        path = t.save()
    with trainer(2, out_dir="elsewhere", steps=11) as t:
        t.load(path)
    with trainer(4) as t:  # half the micro-steps
        t.load(path)
    assert capsys.readouterr().err == ""
    with trainer(1, learning_rate=0.5, seed=7, cooldown=2, steps=11, grad_accumulation=6) as t:
        t.load(path)
    lines = capsys.readouterr().err.splitlines()
    with trainer(2, steps=-1, epochs=3, cooldown=1) as t:
        t.load(path)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "warning: --steps is not given, in the checkpoint's run it was 10",
        "warning: --epochs is 3, in the checkpoint's run it was not given",
    ]
    assert sorted(lines) == sorted(
        [
            "warning: --seed is 7, in the checkpoint's run it was 42",
            "warning: --learning-rate is 0.5, in the checkpoint's run it was 0.01",
            "warning: --cooldown is 2, in the checkpoint's run it was 0",
            "warning: --steps is 11, in the checkpoint's run it was 10",
            f"warning: a step has {6 * B * T} tokens, in the checkpoint's run it had {12 * B * T}",
        ]
    )


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_closed_trainer(world, tmp_path):
    with trainer(world) as t:
        t.step()
        checkpoint = t.save(tmp_path / "c")
        t.close()
    calls = {
        "step 1": [t.step, lambda: t.step(batches())],
        "validate": [t.validate],
        "load": [lambda: t.load(checkpoint)],
        "": [
            lambda: t.save(tmp_path / "d"),
            lambda: t.export(tmp_path / "e"),
            t.weights,
            t.restart,
        ],
    }
    for name, closed in calls.items():
        for call in closed:
            with pytest.raises(RuntimeError, match=f"{name}.*: the ranks are closed: make a new"):
                call()
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_no_memory_is_freed_while_a_rank_works(monkeypatch, fails):
    """On GPUs the others may still be writing into it, even when ranks were stopped."""
    said = []

    def idle(dev):
        time.sleep(0.1 * dev.mesh.rank)
        said.append("idle")
        if fails and dev.mesh.rank == 0:
            raise RuntimeError("the device is lost")

    def update(self, kind):
        raise LlmqError("no more")

    with contextlib.ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(LlmqError, match=r"^rank [012]: no more$"))
        with trainer(3) as t:
            monkeypatch.setattr(HostDevice, "synchronize", idle)
            monkeypatch.setattr(HostDevice, "close", lambda dev: said.append("closed"))
            if fails:
                monkeypatch.setattr(Step, "update", update)
                t.step(batches())
    assert said == ["idle"] * 3 + ["closed"] * 3


def test_a_rank_that_cannot_write_disturbs_no_other(monkeypatch):
    """The error says what went wrong: not what the others miss afterwards."""
    failed = threading.Event()

    def full():
        raise LlmqError("the disk is full")

    def write(fetch, writer, group, pieces, beat):
        if writer.rank == 0:
            assert failed.wait(10)
            return write_group(fetch, writer, group, pieces, beat)
        try:
            return write_group(fetch, writer, group, pieces, full)
        finally:
            failed.set()
            time.sleep(0.3)  # in which the other rank writes on

    monkeypatch.setattr("llmq.run.ranks.write_group", write)
    with trainer(2) as t:
        t.step()
        with pytest.raises(LlmqError, match=r"^rank 1: the disk is full$"):
            t.save("ckpt")
    assert list(Path("ckpt").iterdir()) == []


def failing(real, calls=1):
    """The method, which raises in rank 1 when it is called for the calls-th time."""
    counted = []

    def method(self, *args, **kwargs):
        if self.dev.mesh.rank == 1:
            counted.append(1)
            if len(counted) == calls:
                raise LlmqError("no more")
        return real(self, *args, **kwargs)

    return method


def timed_step(t):
    with t.ranks.time_parts():
        t.enqueue_step()


PHASES = {
    "allocation": (Step, "__init__", 1, None),
    "initial weights": (Weights, "init", 1, None),
    "first step": (Step, "train", 1, lambda t: t.step()),
    "later step": (Step, "train", 3, lambda t: [t.step() for _ in range(5)]),
    "middle of a step": (Step, "micro_step", 5, lambda t: [t.step() for _ in range(5)]),
    "update": (Step, "update", 2, lambda t: [t.enqueue_step() for _ in range(20)]),
    "evaluation": (Step, "evaluate", 1, lambda t: t.validate()),
    "batch of an evaluation": (Step, "evaluate_batch", 1, lambda t: t.validate()),
    "checkpoint": (Step, "state", 1, lambda t: t.save()),
    "loading a checkpoint": (Weights, "refresh", 2, lambda t: t.load(t.save("elsewhere"))),
    "export": (Rank, "pieces", 3, lambda t: t.export()),
    "timing of parts": (Step, "update", 1, timed_step),
}


@pytest.mark.parametrize("phase", PHASES)
def test_one_failing_rank_ends_all(phase, monkeypatch):
    """One error that names the rank, at once; no thread, device or half checkpoint remains."""
    write_tokens(Path("data/eval.bin"), 12, seed=99)
    owner, name, calls, action = PHASES[phase]
    real = getattr(owner, name)
    before = set(threading.enumerate())

    def __init__(self, dev, *args, **kwargs):
        self.dev = dev
        failing(real)(self, dev, *args, **kwargs)

    method = __init__ if name == "__init__" else failing(real, calls)
    monkeypatch.setattr(owner, name, method)
    start = time.monotonic()
    error = pytest.raises(LlmqError, match=r"^rank 1: no more$")
    with error, trainer(3, zero_level=3) as t:
        action(t)
    assert time.monotonic() - start < 5
    left = set(threading.enumerate()) - before
    assert not [t.name for t in left if t.is_alive()]
    assert not Path("ckpt").exists() or not any(Path("ckpt").iterdir())


def test_data_that_cannot_be_read_fails_before_any_rank_begins(monkeypatch):
    real = DataLoader.next_batch

    def next_batch(self):
        if self.rank == 2:
            raise LlmqError("damaged")
        return real(self)

    with trainer(3) as t:
        t.step()
        monkeypatch.setattr(DataLoader, "next_batch", next_batch)
        with pytest.raises(LlmqError, match=r"^damaged$"):
            t.step()
        monkeypatch.undo()
        assert t.steps_done == 1
        t.step(batches())


def test_gpus_warm_up_before_anything_is_loaded(monkeypatch):
    """Without it, what waits for an idle GPU can wait for ever; see docs/decisions/graphs.md."""
    warmed = []

    def open_host(machine, sizes, *, mesh, **options):
        return HostDevice(sizes, mesh=mesh)

    def warm_up(rank, model, seed):
        warmed.append(rank.dev.mesh.rank)

    monkeypatch.setattr(Rank, "warm_up", warm_up)
    with trainer(2) as t:
        assert warmed == []
        monkeypatch.setattr(Machine, "open", open_host)
        gpus = replace(t.machine, kind="cuda")
        Ranks(gpus, t.plan, t.config, t.model).close()
    assert sorted(warmed) == [0, 1]


def test_a_device_that_cannot_be_opened(monkeypatch):
    real, closed = Machine.open, []

    def opened(self, sizes, *, mesh, **kwargs):
        if mesh.rank == 1:
            raise LlmqError("GPU 1 has too little memory")
        dev = real(self, sizes, mesh=mesh, **kwargs)
        dev.close = lambda: closed.append(mesh.rank)
        return dev

    monkeypatch.setattr(Machine, "open", opened)
    with pytest.raises(LlmqError, match=r"^rank 1: GPU 1 has too little memory$"):
        trainer(3)
    assert set(closed) <= {0, 2}  # those that had been opened by then


@pytest.mark.parametrize("world", [1, 3])
def test_a_trainer_whose_weights_cannot_be_loaded_leaves_nothing(world, monkeypatch):
    """A failed constructor frees everything, as the caller has no trainer to close."""
    with trainer(1) as t:
        t.export("model-of-one")

    def no_more(self, *args, **kwargs):
        raise LlmqError("no more")

    closed, before = [], set(threading.enumerate())
    monkeypatch.setattr(Weights, "init", no_more)
    monkeypatch.setattr(Weights, "load", no_more)
    monkeypatch.setattr(HostDevice, "close", lambda dev: closed.append(dev.mesh.rank))
    for given in ({}, {"model": "model-of-one", "from_scratch": False}):
        with pytest.raises(LlmqError, match="no more"):
            trainer(world, **given)
    assert sorted(closed) == sorted([*range(world)] * 2)
    assert not [t.name for t in set(threading.enumerate()) - before if t.is_alive()]


def test_a_rank_that_hangs_is_found(monkeypatch, capsys):
    """The state of each rank is printed, and the others are let go."""
    release = threading.Event()
    real = Step.micro_step

    def micro_step(self, number, *args, **options):
        if self.dev.mesh.rank == 1 and number == 2:
            release.wait(20)
        return real(self, number, *args, **options)

    hung = pytest.raises(
        LlmqError, match=r"no rank has made progress for \d+ seconds; .*--watchdog"
    )
    with hung as error, trainer(2, watchdog=1, zero_level=3) as t:
        monkeypatch.setattr(Step, "micro_step", micro_step)
        start = time.monotonic()
        try:
            t.step()
        finally:
            release.set()
    took = time.monotonic() - start
    assert took < 15  # and not the 20 s of the rank
    first, second = capsys.readouterr().err.splitlines()
    at = re.match(r"rank 0: step 0 for (\d+) s, at workers\.py:\d+ \(barrier\), micro-step ", first)
    seconds = [int(at[1]), int(re.search(r"for (\d+) seconds", str(error.value))[1])]
    assert all(1 <= each <= took + 1 for each in seconds)
    assert re.search(", last collective enqueued: (all_gather|reduce_scatter) ", first)
    assert second.startswith("rank 1: step 0 for ")
    assert ", micro-step 2, last collective enqueued: " in second


def test_progress_within_a_long_command_is_seen(monkeypatch, capsys):
    """Slow micro-steps, and loading or writing many tensors, are no hangs."""
    real = Step.micro_step

    def slow(self, *args, **options):
        time.sleep(0.2)
        return real(self, *args, **options)

    def read(param):
        time.sleep(0.15)
        return np.zeros(param.shape, np.float32)

    with trainer(2, watchdog=1) as t:
        t.ranks.load(read)  # about 10 of the 18 parameters each, 1.5 s
        monkeypatch.setattr(Step, "micro_step", slow)
        t.step()  # 1.2 s
        monkeypatch.setattr(
            "llmq.run.ranks.write_group",
            lambda fetch, writer, group, pieces, beat: (
                [(time.sleep(0.2), beat()) for _ in range(2)]
                and write_group(fetch, writer, group, pieces, beat)
            ),
        )
        t.save()
    assert capsys.readouterr().err == ""


def test_one_rank_has_no_threads_of_its_own():
    before = threading.active_count()
    with trainer(1, watchdog=1) as t:
        t.step(batches())
        assert threading.active_count() == before
        assert isinstance(t.dev.mesh.group(), SingleComm)
