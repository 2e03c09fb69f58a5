"""The way of a micro-step's tokens to the device: one copy, from the next pinned slot."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from llmq.base.batch import Batch
from llmq.base.dtypes import F32, I32, NO_LIMITS, STEP_SCALARS, STEP_SCALARS_WORDS, Limits
from llmq.model.losses.loss import Loss
from llmq.model.results import Results
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device
from llmq.runtime.lane import Ring
from llmq.runtime.mesh import DATA, Mesh
from llmq.state.rules.rule import UpdateRule

MOST_SLOTS = 1024  # for micro-steps on their way to the device
HEADER = 64  # words before the tokens in a slot: StepScalars, padded so that tokens are aligned


class Inbox:
    """The memory from which the device reads a micro-step.

    scalars: I32 (16,) StepScalars. tokens, targets: I32 (B, T). starts: the same, with documents
    that are masked, else None. more: F32 (B, T) or (B, T, W), the arrays that the loss reads, by
    name.
    """

    def __init__(self, dev: Device, options: TrainConfig, loss: type[Loss]):
        self.dev = dev
        shape = B, T = options.batch_size, options.local_seq_len
        widths = dict.fromkeys(["tokens", "targets", *["starts"] * options.document_mask], 1)
        widths |= loss.widths(options)
        words = HEADER + sum(widths.values()) * B * T
        self._inbox = dev.alloc("inbox", (words,), I32, "Activations")
        self.scalars = self._inbox.rows(0, STEP_SCALARS_WORDS)
        edges = HEADER + np.cumsum([0, *widths.values()]) * B * T
        found = {
            name: self._inbox.rows(int(first), int(stop)).view(*shape, *[width] * (width > 1))
            for (name, width), (first, stop) in zip(widths.items(), pairwise(edges), strict=True)
        }
        self.tokens, self.targets, self.starts = (
            found.get(name) for name in ("tokens", "targets", "starts")
        )
        self.more = {name: found[name].view_as(F32) for name in loss.inputs}
        # Enough slots for two steps: by the time a third is enqueued, the first one's result has
        # normally been read, and its slots are free without asking the device. Longer steps wait
        # until the device has got what it was sent so many micro-steps ago.
        slots = min(2 * options.grad_accumulation, MOST_SLOTS)
        self._ring = Ring(dev, "inbox", slots, words, I32)
        self._ticket_of_slot = [-1] * slots  # of the step that last used it

    def send(self, scalars: np.ndarray, batch: Batch, results: Results) -> None:
        """Enqueue the copy. batch: what it lacks of `starts` and `more` is 0. results: of steps,
        which say what the device has read."""
        ring = self._ring
        index = ring.advance()
        if self._ticket_of_slot[index] > results.last_read:
            ring.events[index].synchronize()
        self._ticket_of_slot[index] = results.next_ticket
        if self.dev.kind != "plan":
            words = ring.slots[index].numpy()
            words[:STEP_SCALARS_WORDS] = scalars
            np.concatenate(self._content(Batch(*batch)), out=words[HEADER:])
        self.dev.copy(self._inbox, ring.slots[index])
        self.dev.record(ring.events[index])

    def _content(self, batch: Batch) -> list[np.ndarray]:
        nothing, more = np.zeros_like(batch.inputs), batch.more or {}
        parts = [batch.inputs, batch.targets]
        if self.starts is not None:  # None: each sequence is one document
            parts.append(nothing if batch.starts is None else batch.starts)
        for name, array in self.more.items():
            given = name in more  # by the caller, or the data
            parts.append(more[name].view(np.int32) if given else np.zeros(array.shape, np.int32))
        return [part.reshape(-1) for part in parts]


def scalars_of(
    options: TrainConfig,
    mesh: Mesh,
    rule: UpdateRule,
    step: int,
    micro_step: int,
    lr: float,
    grad_clip: float,
    limits: Limits = NO_LIMITS,
) -> np.ndarray:
    """StepScalars of one micro-step, int32 (STEP_SCALARS_WORDS,)."""
    words = np.zeros(STEP_SCALARS_WORDS, np.int32)
    record = words.view(STEP_SCALARS)[0]
    record["lr"] = lr
    rule.prepare(record, max(step + 1 - rule.begun, 1))  # evaluations have no step
    record["grad_clip"] = grad_clip
    record["norm_limit"], record["loss_limit"] = limits
    record["seed"] = options.seed & 0xFFFFFFFF
    record["step"] = step
    # Over all ranks, so that each rounds its gradients with random numbers of its own.
    record["micro_step"] = mesh.rank * options.grad_accumulation + micro_step
    # Sequences are numbered as they are dealt, on however many ranks and in whatever batches.
    record["sequence_stride"] = stride = mesh.size(*DATA)
    record["first_sequence"] = micro_step * options.batch_size * stride + mesh.index(*DATA)
    return words
