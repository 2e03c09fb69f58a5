"""Runs of the training step on W ranks, without a trainer around it, as arrays to compare.

However many ranks there are, they share the same sequences: world * accum * B = SEQUENCES.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.operand import Fp8, Int8, Operand
from llmq.base.result import Result
from llmq.checkpoint.checkpoint import elements_per_value
from llmq.comm.connect import connect
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.plan import Usage, comm_options, make_plan
from llmq.ref.quantize import quantize
from llmq.runtime.device import HOST_SPEC, Device, DeviceSpec
from llmq.runtime.host_device import HostDevice
from llmq.runtime.mesh import Mesh
from llmq.runtime.workers import Workers
from llmq.state.rules import RULES
from tests.ranks import run_ranks

SEQUENCES = 12
T = 16
LR = 1e-2
# A large epsilon: without it AdamW turns gradients that are nothing but rounding errors, such as
# those of key biases, into whole steps.
FP32 = {"model_dtype": "fp32", "adam_epsilon": 1e-3}
LM_HEAD = "lm_head.fp8"  # among work weights: of fp8 heads
FP8 = {"matmul_dtype": "e4m3"}
DELAYED = FP8 | {"fp8_recipe": "delayed"}


def model(name: str, **changes: Any) -> ModelConfig:
    """A preset with three small layers, one more than there are slots. Its slabs end in gaps and do
    not divide by ranks."""
    heads = {"num_heads": 3, "num_kv_heads": 3 if "gpt2" in name else 1, "head_dim": 16}
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_layers": 3, "max_positions": T}
    return replace(preset(name), **(heads | sizes | changes)).validate()


QWEN2 = model("tiny")
UNTIED = model("tiny-qwen3", tied_embeddings=False)
GPT2 = model("tiny-gpt2")


def config(world: int, accum: int, **options: Any) -> TrainConfig:
    """Options of a run whose step has all sequences."""
    given = {
        "model": "tiny",
        "from_scratch": True,
        "device": "cpu",
        "seq_len": T,
        "grad_accumulation": accum,
        "batch_size": SEQUENCES // (world * accum),
    }
    return make_config(given | options)


def move_in_pieces(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Data that move between memories go so many elements at a time."""
    for module in ("optimizer", "grads", "weights"):
        monkeypatch.setattr(f"llmq.state.{module}.PIECE", elements)


def batches(step: int, rank: int, world: int, accum: int, vocab: int) -> list[Batch]:
    """A rank's part of the sequences of a step; some targets are masked."""
    rng = np.random.default_rng(step)
    x = rng.integers(0, vocab, (SEQUENCES, T + 1)).astype(np.int32)
    targets = np.where(rng.random((SEQUENCES, T)) < 0.2, -100, x[:, 1:]).astype(np.int32)
    parts = [np.split(part, world * accum) for part in (x[:, :-1], targets)]
    return list(zip(*parts, strict=True))[rank * accum : (rank + 1) * accum]


_NEUTRAL = """offload_residual offload_opt_m offload_opt_v offload_master use_zero_copy
    write_combined shard_weights recompute_swiglu recompute_norm recompute_ffn recompute_qkv
    recompute_att recompute_block memcpy_all_gather""".split()


def random_options(seed: int) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    """Ranks, micro-steps, options, and options that change no bit of what these do."""
    r = random.Random(seed)
    world, accum = r.choice([(1, 1), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2), (4, 3)])
    base = dict(r.choice([{}, FP32, FP8, FP8, DELAYED]))
    for dtype in ("opt_m_dtype", "opt_v_dtype"):
        base[dtype] = r.choice(["fp32", "bf16", "e4m3"])
    if "model_dtype" not in base:
        base["master_dtype"], base["grad_accum_dtype"] = r.choices(["fp32", "bf16"], k=2)
    options = {name: True for name in _NEUTRAL if r.random() < 0.4}
    base["all_to_all_reduce"] = r.random() < 0.5
    # One rank adds gradients of micro-steps in the same order, divided or not.
    gradients = options if world == 1 else base
    gradients["shard_gradients"] = options["offload_gradients"] = r.random() < 0.6
    if "matmul_dtype" in base:
        base["head_dtype"] = r.choice(["bf16", "e4m3"])
        options["keep_transposed"] = r.random() < 0.7
        options["persistent_quants"] = "shard_weights" in options and r.random() < 0.6
        options["offload_quants"] = options["persistent_quants"] and r.random() < 0.5
    if base.get("fp8_recipe") == "delayed":
        base["mlp_dtype"] = r.choice(["bf16", "e4m3"])
    return world, accum, base, options


class Session(NamedTuple):
    """The objects that a program on one rank works with."""

    dev: Device
    step: Step
    config: TrainConfig
    vocab: int

    def batches(self, step: int) -> list[Batch]:
        """Sequences of a step that this rank trains on."""
        dev, accum = self.dev, self.config.grad_accumulation
        return batches(step, dev.mesh.rank, dev.mesh.size(), accum, self.vocab)

    def train(self, step: int, lr: float = LR) -> int:
        """Enqueue a step; returns its ticket."""
        return self.step.train(step, lr, self.config.grad_clip, self.batches(step))

    def evaluate(self, step: int = 1000) -> Result:
        """The loss over the sequences of a step."""
        return self.step.evaluate(self.batches(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run. results: what the program returned; extra: Step.extra_state; the same
    on all ranks.

    state[group][parameter]: whole parameters, as a checkpoint would hold them. work[parameter]: the
    weights that products read; of fp8 ones their codes, and work[parameter.scale].
    """

    results: Any
    extra: dict[str, list[float]]
    state: dict[str, dict[str, np.ndarray]]
    work: dict[str, np.ndarray]


def train_steps(steps: int = 3, lr: float = LR) -> Callable[[Session], list[Result]]:
    """A program: train some steps, then evaluate."""

    def program(session: Session) -> list[Result]:
        results = [session.step.result(session.train(step, lr)) for step in range(steps)]
        return [*results, session.evaluate()]

    return program


def run(
    world: int = 1,
    accum: int = 1,
    program: Callable[[Session], Any] | None = None,
    *,
    of: ModelConfig = QWEN2,
    make: Callable[..., Device] = HostDevice,
    spec: DeviceSpec = HOST_SPEC,
    connect: Callable[..., Any] = connect,
    frozen: Collection[str] = (),
    machines: int = 1,
    **options: Any,
) -> Outcome:
    """Run a program (train_steps() if None) on every rank, and check what must always hold.

    Every rank gets the same results, takes exactly the memory that the plan says (so a program has
    to train), and reads weights that follow from the masters of all ranks.
    make(sizes, mesh=, poison=): a rank's device. spec: what it is planned for.
    connect: as llmq.comm.collectives's. frozen: slabs that are not trained. machines: that the
    ranks are taken to be on; with --shard-over machine all of them must have the same state.
    """
    cfg = config(world, accum, **options)
    plan = make_plan(cfg, of, spec, world_size=world, frozen=frozen, machines=machines)
    devices: list[Device | None] = [None] * world

    def rank_fn(rank: int, workers: Workers) -> tuple:
        mesh = Mesh.of(world, rank, plan.shards)
        dev = devices[rank] = make(plan.usage.sizes, mesh=mesh, poison=True)
        workers.barrier()
        if rank == 0:
            connect(devices, comm_options(cfg, plan.placement), workers)
        workers.barrier()
        step = Step(dev, of, cfg.for_step, plan.placement, background=cfg.ckpt_background)
        session = Session(dev, step, cfg, of.vocab_size)
        session.step.weights.init(of, seed=1)
        session.step.optimizer.begin_average(session.step.weights)
        result = (program or train_steps())(session)
        work = _work_weights(session)
        dev.synchronize()
        assert Usage.of(dev) == plan.usage
        return result, session.step.extra_state(), work, _shards(session.step)

    try:
        results, extras, works, shards = zip(*run_ranks(world, rank_fn), strict=True)
    finally:
        for dev in devices:
            if dev is not None:
                dev.close()
    state = _assemble(shards[: plan.shards])
    for first in range(plan.shards, world, plan.shards):
        same = _assemble(shards[first : first + plan.shards])
        for group in state:
            assert_same(state[group], same[group])
    for result, extra, work in zip(results, extras, works, strict=True):
        assert (result, extra) == (results[0], extras[0])
        _check_work(work, state["weights"])
    return Outcome(results=results[0], extra=extras[0], state=state, work=works[0])


def _work_weights(session: Session) -> dict[str, np.ndarray]:
    """The weights that products would read in a micro-step that begins now; all ranks at once."""
    step, found = session.step, {}
    names = {(p.block, p.key): p.name for slab in step.table for p in slab.params}
    step.weights.start_micro_step(step.weights.take_stale())
    for block in ["embed", *(f"layers.{i}" for i in range(step.config.num_layers)), "head"]:
        step.weights.gather(block)
        for key, operand in step.weights.get(block, transposed=True).items():
            found |= _content(session.dev, names[block, key], operand)
        step.weights.release(block)
    if isinstance(step.weights.lm_head(), Fp8):
        found |= _content(session.dev, LM_HEAD, step.weights.lm_head())
    return found


def _content(dev: Device, name: str, operand: Operand) -> dict[str, np.ndarray]:
    if not isinstance(operand, Fp8 | Int8):
        return {name: dev.download(operand)}
    codes, transposed = (dev.download(t) for t in (operand.codes, operand.transposed))
    np.testing.assert_array_equal(transposed, codes.T, err_msg=name)
    return {name: codes, f"{name}.scale": dev.download(operand.scale)}


def _check_work(work: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> None:
    """The work weights must be what follows from all ranks' masters; codes of a frozen model have
    none."""
    known = {*weights, LM_HEAD}
    work = {n: values for n, values in work.items() if n.removesuffix(".scale") in known}
    want = {name: weights[name].astype(work[name].dtype) for name in weights}
    if LM_HEAD in work:
        want[LM_HEAD] = want.get("lm_head.weight", want["model.embed_tokens.weight"])
        weights = weights | {LM_HEAD: want[LM_HEAD]}
    for name in [name for name in want if f"{name}.scale" in work]:
        x, codes, scale = weights[name], np.empty_like(work[name]), np.empty(1, np.float32)
        largest = np.abs(x).max().astype(np.float32).reshape(1)
        quantize.quantize(codes, scale, x, largest, x.size)
        want |= {name: codes, f"{name}.scale": scale}
    assert_same(work, want)


def _shards(step: Step) -> dict[str, dict[str, tuple]]:
    """Slabs and this rank's elements of each, by group and slab."""
    return {
        group: {p.slab.name: (p.slab, step.dev.download(p.tensor)) for p in pieces}
        for group, pieces in step.state().items()
    }


OF_MATRICES = {
    group: elements_per_value(group)
    for rule in RULES.values()
    for state in rule.matrix_states
    for group in (state.group, state.scales_group)
}
"""Elements per value of groups whose slabs are whole on one rank."""


def _assemble(ranks: Sequence[dict]) -> dict[str, dict[str, np.ndarray]]:
    """Parameters from the shards of all ranks; scales by slab, as they have no parameters. States
    of matrices are whole on one rank, and ranks behind it may have some that nobody reads."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for group, slabs in ranks[0].items():
        found = groups[group] = {}
        if group in OF_MATRICES:
            block = OF_MATRICES[group]
            for slab, values in (own for rank in reversed(ranks) for own in rank[group].values()):
                for p in slab.params:
                    found[p.name] = values[p.offset // block : (p.offset + p.size) // block]
            continue
        for name, (slab, _) in slabs.items():
            whole = np.concatenate([rank[group][name][1] for rank in ranks])
            if whole.size != slab.size:
                found[name] = whole
                continue
            for p in slab.params:
                found[p.name] = whole[p.offset : p.offset + p.size].reshape(p.shape)
            for start, stop in slab.gaps() if group != "adam.v" else []:
                assert not whole[start:stop].astype(np.float32).any(), f"{group}: gap in {name}"
    return groups


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Bitwise equality, NaN included."""
    assert a.keys() == b.keys()
    for name in a:
        one, other = (np.ascontiguousarray(x[name]).reshape(-1).view(np.uint8) for x in (a, b))
        assert one.size == other.size and (one == other).all(), f"{name} differs"


def assert_same_run(a: Outcome, b: Outcome) -> None:
    """Equal in all results and bitwise in all weights and moments."""
    assert (a.results, a.extra) == (b.results, b.extra)
    assert_same(a.work, b.work)
    for group in a.state:
        assert_same(a.state[group], b.state[group])
