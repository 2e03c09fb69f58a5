"""Scoring of tokens by a model, without gradients."""

from contextlib import ExitStack

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, I32, MIB, DType
from llmq.base.step_inputs import StepInputs
from llmq.model.model import Model
from llmq.ops.loss.labels import Labels
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device
from llmq.state.params import Slab
from llmq.state.placement import Placement, place, resident
from llmq.state.weights import Weights

LOGITS_BYTES = 256 * MIB  # most bytes of logits in memory at a time


class Scorer:
    """Computes the loss of each token, or with a score head of one label -score. Memory is
    allocated for the shape (B, T) of the last batch. T must be a multiple of 4."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        weights: Weights,
        backend: str = "native",
        *,
        base_dtype: str | None = None,
        greedy: bool = False,
    ):
        """weights: the weights in a placement of placed_to_read() with this base_dtype. backend:
        backend of attention, as in halves/attention.directions. greedy: True if the likeliest
        tokens are wanted, too."""
        self.dev, self.config, self.weights = dev, config, weights
        self._backend = backend
        self._dtype, self._base_dtype = weights.placement["embed"].work.dtype, base_dtype
        self._shape, self._greedy = (0, 0), greedy
        self._temps = ExitStack()

    def take_shape(self, B: int, T: int) -> None:
        """Free the memory for the last batch's shape, and allocate memory for batches (B, T)."""
        if self._shape == (B, T):
            return
        self._temps.close()
        self._temps.enter_context(self.dev.temporary())
        tensors = (
            self.dev.alloc(name, (B, T), I32, "Activations") for name in ("tokens", "targets")
        )
        self._inputs, self._labels = StepInputs(*tensors), None
        if self.config.num_labels == 1:
            hits = self.dev.alloc("hits", (B * T,), F32, "Activations")
            self._labels = Labels(hits, linear=True)
        if self._greedy:
            self._likeliest = self.dev.alloc("likeliest", (B * T, 2), F32, "Activations")
        options = scoring_options(self.config, self._dtype, B, T, self._base_dtype).for_step
        self._model = Model(
            self.dev, self.config, options, self.weights, self._backend, self._inputs
        )
        self._shape = (B, T)

    def rehearse(self, B: int, T: int) -> None:
        """Plan the memory of one batch of this shape, on a device that only plans."""
        self.take_shape(B, T)
        self._forward()
        self._loss()

    def _forward(self) -> None:
        self._model.forward(stale=False, keep=False)

    def score(self, inputs: np.ndarray, rounds: list[np.ndarray]) -> list[np.ndarray]:
        """Return the losses F32 (B, T) of each array of targets, 0 for masked targets. The call
        waits for the device; inputs: int32 (B, T). rounds: arrays of targets, int32 (B, T), -100
        for masked targets."""
        self.take_shape(*inputs.shape)
        self.dev.upload(self._inputs.tokens, inputs)
        self.dev.graph(("score forward", *inputs.shape), self._forward)
        losses = []
        for targets in rounds:
            self.dev.upload(self._inputs.targets, targets)
            self.dev.graph(("score loss", *inputs.shape), self._loss)
            losses.append(self.dev.download(self._model.head.losses).reshape(inputs.shape))
        return losses

    def likeliest(self) -> np.ndarray:
        """Return the likeliest next tokens I32 (B, T) of the batch scored last, if `greedy` is
        True; the call waits for the device."""
        ids = self.dev.download(self._likeliest)[:, :1].copy()
        return ids.view(np.int32).reshape(self._shape)

    def _loss(self) -> None:
        self._model.token_losses(self._labels)
        if self._greedy:
            self._model.top_k(self._likeliest)


def scoring_options(
    config: ModelConfig, dtype: DType, B: int, T: int, base_dtype: str | None = None
) -> TrainConfig:
    """Return options of forward passes that keep no activations, with weights and activations in
    `dtype`. base_dtype: format of the blocks' matrices (--base-dtype), whose products are computed
    in `dtype`."""
    groups = B * T // 4  # logits have a multiple of 4 rows
    most = max(LOGITS_BYTES // (4 * config.padded_outputs * dtype.itemsize), 1)
    chunks = next(n for n in range(-(-groups // most), groups + 1) if groups % n == 0)
    how = {}
    if base_dtype is not None:
        how = {"base_dtype": base_dtype, "matmul_dtype": dtype.name, "only_scores": True}
    options = TrainConfig(
        model_dtype=dtype.name, batch_size=B, seq_len=T, recompute_block=True, lmhead_chunks=chunks,
        **how,
    )  # fmt: skip
    return options.normalized()


def placed_to_read(
    config: ModelConfig, table: tuple[Slab, ...], dtype: DType, base_dtype: str | None
) -> Placement:
    """Return the placement of weights that are only read, for the arguments of scoring_options.
    Raise ConfigError for a base_dtype that the model does not support."""
    if base_dtype is None:
        return resident(table, dtype)
    options = scoring_options(config, dtype, 1, 4, base_dtype)
    return place(options.validate_with(config).for_step, table)
