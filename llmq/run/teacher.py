"""The teacher of `llmq rl --teacher`: a second model in the process that scores samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.batch import Batch
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import Closing
from llmq.options.options import TrainConfig
from llmq.plan.memory import memory_limit, needed_bytes
from llmq.run.model_of_run import model_of_run, planned_model
from llmq.run.ranks import Rank
from llmq.run.run_paths import find_model
from llmq.run.score import SCORED
from llmq.run.trainer import Trainer
from llmq.text.tokenizer import ByteTokenizer
from llmq.text.tokenizer_id import tokenizer_of_folder

_SHARED = "seq_len batch_size device gpus model_dtype base_dtype attention use_cuda_graphs p2p"
UNLIKELY = -40.0  # log-probability that counts as probability 0


def teacher_of(
    config: TrainConfig, *, plans: bool = False
) -> tuple[TrainConfig, ModelConfig, Path | None]:
    """Return options, model and model directory of a run's teacher. plans: True if no weights are
    needed, see planned_model. Raises LlmqError for a model that cannot be a teacher."""
    shared = {name: getattr(config, name) for name in (*_SHARED.split(), "loss", "loss_params")}
    own = {"model": find_model(config.teacher), "train_file": ("none",), "document_mask": True}
    made = TrainConfig(**SCORED | shared | own).normalized()
    try:
        found = planned_model(made) if plans else (made, *model_of_run(made))
        found[0].validate_with(found[1])
    except LlmqError as error:
        raise type(error)(f"--teacher: {error.headline}", error.details) from None
    if found[1].num_labels:
        raise ConfigError("--teacher: has a score head, which predicts no tokens")
    return found


class Teacher(Closing):
    """Scores a trainer's samples by the teacher, on the trainer's devices. Raises LlmqError if the
    tokenizers differ, or if the trainer leaves too little memory."""

    def __init__(self, trainer: Trainer):
        config, model, folder = teacher_of(trainer.config)
        left = memory_limit(trainer.config, trainer.machine).device
        left -= needed_bytes(trainer.plan, trainer.dev.spec)
        self._vocab = trainer.model.vocab_size
        own = Trainer.from_config(replace(config, memory_limit=max(left, 1)), model, folder)
        try:
            same = _fingerprint(trainer.tokenizer) == _fingerprint(own.tokenizer)
            if not (same or trainer.config.allow_other_tokenizer):
                raise ConfigError(
                    f"--teacher: '{config.model}' has another tokenizer than the model, so that "
                    "its ids mean other texts; --allow-other-tokenizer if you know better"
                )
            own.load_weights()
        except BaseException:
            own.close()
            raise
        self._trainer = own

    def score(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """Return, for each micro-batch of B sequences of T tokens, the teacher's k likeliest next
        tokens at each position: ids, then log-probabilities, F32 (B, T, 2 k)."""
        vocab = self._trainer.model.vocab_size
        given = [
            partial(b._replace, inputs=np.where(b.inputs < vocab, b.inputs, 0), named={})
            for b in batches
        ]
        found = self._trainer.ranks.share("score", given, _scored)
        return [_of_vocabulary(each, self._vocab) for each in found]

    def close(self) -> None:
        """Free the teacher's memory."""
        self._trainer.close()


def _fingerprint(source: str | None) -> str | None:
    """Return the fingerprint of the tokenizer `source`; None for an unknown tokenizer."""
    if source is None or source == ByteTokenizer.fingerprint:
        return source
    made = tokenizer_of_folder(Path(source))
    return made and made.fingerprint


def _scored(rank: Rank, _: int, batch: Batch) -> np.ndarray:
    return rank.step.score_top_k(batch)


def _of_vocabulary(scores: np.ndarray, vocab: int) -> np.ndarray:
    """Return scores (B, T, 2 k) in which unlikely other tokens replace ids from `vocab` on. A
    larger teacher may have more rows than the trained model for the same tokenizer."""
    k = scores.shape[-1] // 2
    ids = scores[..., :k].view(np.int32)
    for row in np.argwhere((ids >= vocab).any(axis=-1)):
        own = ids[tuple(row)]
        lacking = own >= vocab
        own[lacking] = np.setdiff1d(np.arange(2 * k), own)[: lacking.sum()]
        scores[tuple(row)][k:][lacking] = UNLIKELY
    return scores
