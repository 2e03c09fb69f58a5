"""A model with nothing but weights: how likely tokens are, and what follows them."""

from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import I32, MIB, DType
from llmq.base.step_inputs import StepInputs
from llmq.model.activations import Cache
from llmq.model.model import Model
from llmq.options.options import StepOptions, TrainConfig
from llmq.runtime.device import Device
from llmq.state.weights import Weights

LOGITS_BYTES = 256 * MIB  # at most, that exist at a time


class Inference:
    """Passes over batches. One shape (B, T) has memory at a time, that of the last batch.
    predicts: whether batches have targets."""

    predicts: ClassVar[bool] = False

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        weights: Weights,
        backend: str = "native",
        cache: Cache | None = None,
    ):
        """weights: as placement.resident has them. backend: see directions. cache: as of Model."""
        self.dev, self.config, self.weights = dev, config, weights
        self._how = {"backend": backend, "cache": cache}
        self._dtype = weights.placement["embed"].work.dtype
        self._shape = (0, 0)
        self._temps = ExitStack()

    def options(self, B: int, T: int) -> StepOptions:
        return scoring_options(self.config, self._dtype, B, T).for_step

    def take_shape(self, B: int, T: int) -> None:
        """Have memory for batches of this shape instead of the last one."""
        if self._shape == (B, T):
            return
        self._temps.close()
        self._temps.enter_context(self.dev.temporary())
        names = ("tokens", "targets") if self.predicts else ("tokens",)
        tensors = (self.dev.alloc(name, (B, T), I32, "Activations") for name in names)
        self._inputs = StepInputs(*tensors)
        options = self.options(B, T)
        self._model = Model(
            self.dev, self.config, options, self.weights, inputs=self._inputs, **self._how
        )
        self._shape = (B, T)

    def _forward(self, position: int = 0) -> None:
        self._model.forward(stale=False, keep=False, position=position)


class Scorer(Inference):
    """The losses of tokens. T: multiples of 4."""

    predicts = True

    def rehearse(self, B: int, T: int) -> None:
        """One batch of this shape, for a device that only plans."""
        self.take_shape(B, T)
        self._forward()
        self._loss()

    def score(self, inputs: np.ndarray, rounds: list[np.ndarray]) -> list[np.ndarray]:
        """The losses F32 (B, T) of each round of targets, 0 where masked; waits for the device.
        inputs, targets: int32 (B, T), targets -100 where masked."""
        self.take_shape(*inputs.shape)
        self.dev.upload(self._inputs.tokens, inputs)
        self.dev.graph(("score forward", *inputs.shape), self._forward)
        losses = []
        for targets in rounds:
            self.dev.upload(self._inputs.targets, targets)
            self.dev.graph(("score loss", *inputs.shape), self._loss)
            losses.append(self.dev.download(self._model.head.losses).reshape(inputs.shape))
        return losses

    def _loss(self) -> None:
        self._model.token_losses()


class Decoder(Inference):
    """One text of at most `positions` tokens; call `forward` with what comes next."""

    def __init__(self, dev: Device, config: ModelConfig, weights: Weights, positions: int):
        dtype = weights.placement["embed"].work.dtype
        super().__init__(dev, config, weights, cache=Cache(dev, config, dtype, positions))
        self.positions, self._end = positions, 0
        halves = (half for layer in range(config.num_layers) for half in config.halves(layer))
        self._carries = any(half.carried for half in halves)

    def options(self, B: int, T: int) -> StepOptions:
        """Those of a model for this shape; logits are made row by row."""
        options = super().options(1, 4)
        batch = replace(options.batch, seq_len=T)
        return options._replace(batch=batch, memory=replace(options.memory, lmhead_chunks=T))

    def rehearse(self) -> None:
        """Passes of the most memory, for a device that only plans: a kernel of ours that computes
        several operations may need less, and takes no odd number of rows. And one of a token, which
        may have kernels of its own."""
        for n in {self.positions, max(self.positions - 1, 1), 1}:
            self.take_shape(1, n)
            self._forward()
            for _ in self._model.logits([n - 1]):
                pass

    def forward(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Run tokens (n,), the text's elements [position, position + n). Returns logits F32 (V,),
        which predict element position + n; waits for the device."""
        n = len(tokens)
        if not 0 < n <= self.positions - position:
            raise ValueError(f"decode: {n} tokens at {position} exceed {self.positions} positions")
        if self._carries and position not in (0, self._end):
            raise ValueError(f"decode: the state is that of {self._end} tokens, not of {position}")
        self._end = position + n
        self.take_shape(1, n)
        self.dev.upload(self._inputs.tokens, tokens.astype(np.int32)[None])
        self._forward(position)
        return self._model.next_logits([n - 1])[0]


def scoring_options(config: ModelConfig, dtype: DType, B: int, T: int) -> TrainConfig:
    """Options of forward passes that keep nothing, with weights and activations of this format."""
    groups = B * T // 4  # rows of logits come in multiples of 4
    most = max(LOGITS_BYTES // (4 * config.padded_outputs * dtype.itemsize), 1)
    chunks = next(n for n in range(-(-groups // most), groups + 1) if groups % n == 0)
    options = TrainConfig(
        model_dtype=dtype.name, batch_size=B, seq_len=T, recompute_block=True, lmhead_chunks=chunks
    )
    return options.normalized()
