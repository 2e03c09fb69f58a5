"""Search for the first tensor with an infinity or NaN, by running the micro-steps of a step again.

weights -> activations of each micro-step, in order -> losses -> gradients, last layer first

One kernel launch checks a tensor by its largest absolute value; NaN counts as the largest value.
The search allocates no device memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.callback import StepDone
from llmq.base.dtypes import BF16, F32
from llmq.base.errors import LlmqError
from llmq.base.tensor import Tensor
from llmq.checkpoint.finite import reached, unmoved_lines
from llmq.model.step import Step
from llmq.ops.quantize import fp8_scale
from llmq.ops.quantize.fp8_scale import STRIDE
from llmq.run.guard import Guard
from llmq.run.metrics import Reporter
from llmq.run.monitor import Probe
from llmq.run.ranks import Rank, Ranks

MAX_SKIPPED = 10  # number of steps in a row without an update that ends a run
AT_A_TIME = 64  # tensors whose largest values share a scratch tensor

_LOGGED = {  # names of quantized tensors in llm.q's log; all others: act.NAME.{}, grad.NAME.{}
    "att": "act.att{}",
    "mlp_act": "act.swiglu.{}",
    "d_att": "grad.res_att.{}",
    "d_mlp": "grad.res_ffn.{}",
    "d_mlp_act": "grad.swiglu.{}",
}


class NanOrigin(NamedTuple):
    """The first tensor in order of computation that is not finite. text: words that continue "first
    seen in". in_weights: True if the tensor is a weight, which makes all later steps fail."""

    text: str
    in_weights: bool = False


class _Entry(NamedTuple):
    """A tensor, or its measured largest absolute value. order: sort key, by order of
    computation."""

    order: tuple[int, int]
    name: str
    value: Tensor | float


def find_origin(ranks: Ranks, step: int, batches: Sequence[Sequence[Batch]]) -> NanOrigin | None:
    """Run all micro-steps of a step again, and return the first tensor that is not finite, or None.
    step: number of the step, from 0. batches: the step's batches for each rank of this process. The
    search overwrites gradients and losses."""
    bad = _first_bad(ranks, lambda rank: _pieces(rank, "weights"))
    if bad is not None:
        return NanOrigin(f"the weight {bad.name}", in_weights=True)

    def forward(rank: Rank, micro_step: int) -> list[_Entry]:
        own = batches[rank.dev.mesh.rank - ranks.world.base]
        rank.step.evaluate_batch(own[min(micro_step, len(own) - 1)])
        return _activations(rank.step)

    for micro_step in range(max(map(len, batches))):
        bad = _first_bad(ranks, lambda rank, i=micro_step: forward(rank, i))
        if bad is not None:
            return NanOrigin(f"{bad.name}, micro-step {micro_step}")

    def backward(rank: Rank) -> list[_Entry]:
        rank.step.start()
        own = batches[rank.dev.mesh.rank - ranks.world.base]
        for i, batch in enumerate(rank.counted(own)):
            scalars, last = rank.step.scalars_of(step, i, 0.0, 0.0), i == len(own) - 1
            rank.step.inbox.send(scalars, batch, rank.step.results)
            rank.step.calibrate()
            rank.dev.graph(*rank.step.micro_step(i, last=last))
        return _measured_gradients(rank.step) + _pieces(rank, "gradients")

    bad = _first_bad(ranks, backward)
    return None if bad is None else NanOrigin(f"the gradient of {bad.name}")


def _measured_gradients(step: Step) -> list[_Entry]:
    """Return measured largest values of gradients that exist only as quantized codes. Codes cannot
    represent NaN."""
    return [
        _Entry(
            _place(step.config, f"layers.{layer}", name),
            f"{name.removeprefix('d_')} of layer {layer}",
            value,
        )
        for (layer, name), value in step.model.operands.largest().items()
        if name.startswith("d_")
    ]


def check_update(
    ranks: Ranks, reporter: Reporter, done: StepDone, guard: Guard, left_out: str | None
) -> None:
    """Report why a step made no update. left_out: the guard's reason, if the guard prevented the
    update. Raises LlmqError if the run cannot recover and the guard does not roll back."""
    step, result, unchanged = done.step, done.result, guard.unchanged
    if unchanged == 0:
        return
    if result.tokens == 0:
        reason, advice = "all targets are masked", "look at the loss masks of the data"
    elif not math.isfinite(result.norm):
        reason = f"the gradient norm is {result.norm}"
        advice = "go on from the newest good checkpoint: --continue, lower --learning-rate"
    else:
        reason = left_out
        advice = "use --guard rollback, or --guard warn if the data are other ones from here on"
    may_end = guard.mode != "rollback" or result.tokens == 0
    origin = None
    first = unchanged == 1  # later bad steps in a row have the same reason
    if first and result.tokens > 0 and left_out is None:
        origin = find_origin(ranks, step, ranks.batches_of(done.ticket))
        where = f"first seen in {origin.text}" if origin else "computed again all is finite"
        reason += f"; {where}"
    reporter.message(f"WARNING: step {step} changed no weights: {reason}", step)
    if origin is not None and origin.in_weights and may_end:
        raise LlmqError(f"step {step}: {origin.text} is not finite any more: {advice}")
    if unchanged >= MAX_SKIPPED and may_end:
        raise LlmqError(
            f"{MAX_SKIPPED} steps in a row changed no weights, the last one is {step}: "
            f"{reason}; {advice}"
        )


def not_moved(ranks: Ranks) -> list[str]:
    """Return a line about trained tensors whose moments are still zero, or no line if all have
    moved."""

    def moments(rank: Rank) -> tuple[list[str], list[str]]:
        every, found = [], []
        for group in rank.step.optimizer.moment_groups():
            for _, name, value in _pieces(rank, group):
                every.append(name)

                def read(start: int, stop: int, value: Tensor = value) -> np.ndarray:
                    return rank.dev.download(value.rows(start, stop))

                if name not in found and reached(read, value.size):
                    found.append(name)
        return every, found

    of_ranks = ranks.everywhere("looking for what has not moved", moments)
    every = dict.fromkeys(name for names, _ in of_ranks for name in names)
    moved = {name for _, names in of_ranks for name in names}
    return unmoved_lines([name for name in every if name not in moved], len(every))


class AbsMaxes(Probe):
    """Reports largest absolute values of quantized tensors every --debug-log-abs-max steps."""

    def __init__(self, ranks: Ranks, reporter: Reporter, every: int):
        self._ranks, self._reporter, self._every = ranks, reporter, every

    def measures(self, step: int) -> bool:
        return step % self._every == 0

    def on_step(self, step: StepDone) -> None:
        if self.measures(step.step):
            self._reporter.abs_maxes(step.step, abs_maxes(self._ranks))


def abs_maxes(ranks: Ranks) -> dict[str, float]:
    """Return largest absolute values of the tensors that the last step has quantized, by llm.q's
    names. Returns {} in runs without fp8.

    The values are of the last micro-step, or with delayed scales of all micro-steps.
    """
    of_ranks = ranks.everywhere("abs-maxes", lambda rank: rank.step.model.operands.largest())
    found = {}
    for layer, name in of_ranks[0]:
        kind = "grad" if name.startswith("d_") else "act"
        logged = _LOGGED.get(name, f"{kind}.{name.removeprefix('d_')}.{{}}")
        largest = np.max([of_rank[layer, name] for of_rank in of_ranks])
        found[logged.format(layer)] = float(largest)
    return found


def _pieces(rank: Rank, group: str) -> list[_Entry]:
    """Return this rank's shards of parameters, gradients or moments. group: see Rank.pieces."""
    config, entries = rank.step.config, []
    for piece in rank.pieces(group):
        for param, first, last in piece.slab.pieces(piece.start, piece.stop):
            part = piece.tensor.rows(first - piece.start, last - piece.start)
            order = (0, param.index)
            if group == "gradients":
                order = _place(config, param.block, param.key)
            entries.append(_Entry(order, param.name, part))
    return entries


def _place(config: ModelConfig, block: str, name: str) -> tuple[int, int]:
    """Return the sort key of a gradient in the order of the backward pass: head, layers from the
    last to the first, embedding. name: name of a layer's gradient, one of
    HalfSpec.backward_order."""
    if not block.startswith("layers."):
        return (0 if block == "head" else config.num_layers + 1), 0
    layer = int(block.removeprefix("layers."))
    names = (n for half in reversed(config.halves(layer)) for n in half.backward_order)
    return config.num_layers - layer, [*names].index(name)


def _activations(step: Step) -> list[_Entry]:
    """Return the tensors in memory after a forward pass: activations, kept or quantized, and
    losses."""
    model, config, layers = step.model, step.config, step.config.num_layers
    kept = {tensor.name: tensor for _, tensor in step.dev.arenas["device"].tensors}
    entries, order = [], {}
    for layer in range(layers):
        if not model.residuals.leaves(layer):
            entries.append(_Entry((layer, -1), f"the input of layer {layer}",
                                  model.residuals.tensors[layer]))  # fmt: skip
        between = {}
        for stream, half in zip(model.blocks.streams[1:], config.halves(layer), strict=False):
            between[f"residual_{half.name}"] = stream
        computed = [(*half.computed, f"residual_{half.name}") for half in config.halves(layer)]
        for i, name in enumerate(chain(*computed)):
            order[layer, name] = (layer, i)
            tensor = kept.get(f"{name}.{layer}")
            if name in between and not between[name].leaves(layer):
                tensor = between[name].tensors.get(layer, tensor)
            if tensor is not None and tensor.dtype in (F32, BF16):
                entries.append(_Entry((layer, i), f"{name} of layer {layer}", tensor))
    for (layer, name), value in model.operands.largest().items():
        if (layer, name) in order:
            entries.append(_Entry(order[layer, name], f"{name} of layer {layer}", value))
    head = model.head
    for i, (name, tensor) in enumerate(
        (("the output of the last layer", head.residual), ("the final norm", head.out),
         ("the losses", head.losses))
    ):  # fmt: skip
        entries.append(_Entry((layers, i), name, tensor))
    return entries


def _first_bad(ranks: Ranks, entries: Callable[[Rank], list[_Entry]]) -> _Entry | None:
    """Return the first entry that is not finite, over all ranks, in the order of computation."""

    def first(rank: Rank) -> _Entry | None:
        in_order = sorted(entries(rank), key=lambda entry: entry.order)
        found = ((e, value) for e, value in _largest(rank, in_order) if not math.isfinite(value))
        return next((entry._replace(value=value) for entry, value in found), None)

    found = [entry for entry in ranks.everywhere("diagnosis", first) if entry is not None]
    return min(found, key=lambda entry: entry.order, default=None)


def _largest(rank: Rank, entries: list[_Entry]) -> Iterator[tuple[_Entry, float]]:
    """Yield the entries with their tensors' largest absolute values."""
    dev = rank.dev
    for start in range(0, len(entries), AT_A_TIME):
        rank.beat()
        part = entries[start : start + AT_A_TIME]
        with dev.scratch("largest", (len(part) * STRIDE,), F32) as slots:
            dev.zero(slots)
            for i, entry in enumerate(part):
                if isinstance(entry.value, Tensor):
                    slot = slots.rows(i * STRIDE, i * STRIDE + 1)
                    fp8_scale.abs_max(dev, slot, entry.value)
            values = dev.download(slots)[::STRIDE].tolist()
        for entry, value in zip(part, values, strict=True):
            yield entry, value if isinstance(entry.value, Tensor) else entry.value
