"""A rehearsal of a rank's step, which captures graphs and counts memory: every kind of micro-step,
evaluation and update, on token 0."""

import numpy as np

from llmq.base.batch import Batch
from llmq.base.shares import EQUAL
from llmq.model.step import Step


def rehearse(step: Step) -> None:
    """Run every kind of micro-step, evaluation and update once, on token 0.

    The rehearsal includes a step with a single micro-step, as at the end of an epoch.
    """
    rehearse_evaluation(step)
    if step.options.model.only_scores:
        return
    # With --share a rank may have one more micro-step, between the first and the last.
    most = step.options.batch.grad_accumulation + (step.options.parallel.share != EQUAL)
    for count in {most, 1}:
        step.start()
        step.weights.updated()
        for micro_step in sorted({0, min(1, count - 1), count - 1}):
            _rehearse_micro_step(step, micro_step, count)
        for kind in step.optimizer.rule.kinds:
            step.update(kind)
        rehearse_evaluation(step)
        _rehearse_micro_step(step, 0, count)  # covers a first micro-step after an evaluation


def rehearse_evaluation(step: Step) -> None:
    """Evaluate directly after an update, and once more after an evaluation."""
    step.weights.updated()
    step.evaluate([_nothing(step)] * 2)


def _rehearse_micro_step(step: Step, micro_step: int, count: int) -> None:
    scalars, last = step.scalars_of(0, micro_step, 0.0, 0.0), micro_step == count - 1
    step.inbox.send(scalars, _nothing(step), step.results)
    step.calibrate()
    step.dev.graph(*step.micro_step(micro_step, last=last))


def _nothing(step: Step) -> Batch:
    shape = (step.options.batch.batch_size, step.options.batch.seq_len)
    return Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32))
