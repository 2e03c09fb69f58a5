"""Whether batches that a caller of Trainer.step made are what a step takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmq.base.batch import Batch
from llmq.config.model import ModelConfig
from llmq.config.options import TrainConfig
from llmq.data.tokens import MASKED_TARGET


def check_batches(
    batches: Sequence[Batch], config: TrainConfig, model: ModelConfig, world_size: int
) -> None:
    """ValueError for a wrong number of micro-batches, or for wrong shapes, dtypes or ids in one."""
    shape, count = (config.batch_size, config.seq_len), config.grad_accumulation * world_size
    if len(batches) != count:
        of_ranks = f" for each of {world_size} ranks" if world_size > 1 else ""
        raise ValueError(
            f"step: grad_accumulation is {config.grad_accumulation}{of_ranks}, got "
            f"{len(batches)} batches"
        )
    for inputs, targets, *_ in batches:
        for name, array in (("inputs", inputs), ("targets", targets)):
            if array.shape != shape or array.dtype != np.int32:
                raise ValueError(
                    f"step: {name} must be int32 {shape}, got {array.dtype} {array.shape}"
                )
            bad = array.view(np.uint32) >= model.vocab_size  # a negative id is a large unsigned one
            bad &= (name == "inputs") | (array != MASKED_TARGET)
            if bad.any():
                allowed = f"token ids in 0..{model.vocab_size - 1}, targets also {MASKED_TARGET}"
                raise ValueError(f"step: {name} must be {allowed}, got {array[bad][0]}")
