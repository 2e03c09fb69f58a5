"""What a block keeps from forward to backward: options, and the tensors of one layer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple, TypeVar

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, F32, DType
from llmq.base.layers import layer_set
from llmq.base.tensor import Tensor
from llmq.model import norm
from llmq.model.norm import Stats
from llmq.model.parameters import BlockParameters
from llmq.options.adapters import adapted_matrices, adapters_of
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device

T = TypeVar("T")


class Recompute(NamedTuple):
    """What a layer computes again in the backward pass instead of keeping it: --recompute-…"""

    swiglu: bool = False
    norm: bool = False
    ffn: bool = False
    qkv: bool = False
    att: bool = False
    block: bool = False

    @property
    def products(self) -> frozenset[str]:
        """The matrices that multiply inputs in backward, by their keys in a block."""
        keys = {"qkv": self.qkv, "o": self.block, "up": self.ffn}
        return frozenset(key for key, again in keys.items() if again)


def recompute_of_layers(options: TrainConfig, num_layers: int) -> list[Recompute]:
    """For each layer what the options say, or nothing. options: normalized."""
    chosen = layer_set(options.recompute_layers, num_layers)
    asked = Recompute(*[getattr(options, f"recompute_{name}") for name in Recompute._fields])
    return [asked if layer in chosen else Recompute() for layer in range(num_layers)]


def slot(layer: int, name: str) -> str:
    """The name of a block's tensor among those of all blocks."""
    return f"layers.{layer}.{name}"


class Activation(NamedTuple):
    """An activation of one layer, and what is kept of it from forward to backward.

    shape: (rows, features), rows = B*T. tensor: the whole of it, in this dtype, which may be of the
    codes that a product writes. codes: fp8 (features, rows), which are enough where backward only
    needs it for a weight's gradient. With neither it is scratch.
    """

    layer: int
    name: str
    shape: tuple[int, int]
    dtype: DType
    tensor: Tensor | None
    codes: Tensor | None

    @property
    def slot(self) -> str:
        """Its name among those of all layers."""
        return slot(self.layer, self.name)

    def place(self, dev: Device, temps: ExitStack) -> Tensor:
        """Where it is kept, else scratch that lives as long as temps."""
        if self.tensor is not None:
            return self.tensor
        return temps.enter_context(dev.scratch(self.name, self.shape, self.dtype))


class Stream(NamedTuple):
    """The buffers that a layer shares with its neighbours, (rows, C) each; see block_norms.py.

    before, after: the residual stream in front of the layer and behind it. between: that between
    the halves of all layers whose whole block is recomputed, where it only has to survive until
    the next layer begins. att_branch, mlp_branch: what halves put out, of all layers, and
    branch_before, what the layer in front has put out; None where halves add to the stream
    themselves.
    """

    before: Tensor
    after: Tensor
    between: Tensor | None
    att_branch: Tensor | None
    mlp_branch: Tensor | None
    branch_before: Tensor | None


class HalfOut(NamedTuple):
    """Where a half's last product goes, (rows, C): to `out`, with `addend` if there is one."""

    out: Tensor
    addend: Tensor | None = None


class NormSite(NamedTuple):
    """The norms in front of a half of one layer, and the residual stream there; see block_norms.py.

    stream: (rows, C). branch: (rows, C), what the half before has put out; None where it has added
    that to the stream itself. out: the half's input. stats: of the stream's norm, post_stats: of
    the branch's; None where there is none.
    """

    stream: Tensor
    branch: Tensor | None
    stats: Stats | None
    post_stats: Stats | None
    out: Activation

    def parameters(self, block: BlockParameters[T]) -> tuple[T | None, T | None]:
        """Weight and bias of the stream's norm among those of its block, or their gradients."""
        return getattr(block, self.out.name), getattr(block, f"{self.out.name}_bias")

    def post_weight(self, block: BlockParameters[T]) -> T | None:
        """The weight of the branch's norm, or its gradient."""
        return getattr(block, f"{self.out.name}_post")


def _site_stats(
    dev: Device, config: ModelConfig, name: str, rows: int
) -> tuple[Stats | None, Stats | None]:
    """Those of a NormSite."""
    pre, post = config.arch.pre_norm, config.arch.post_norm
    stats = norm.alloc_stats(dev, config, name, rows) if pre else None
    return stats, norm.alloc_stats(dev, config, f"{name}.post", rows) if post else None


def needed_inputs(config: ModelConfig, options: TrainConfig) -> set[str]:
    """The matrices, by key, whose gradients, or those of their adapters, need their inputs."""
    adapters = adapters_of(options)
    if adapters is None:
        return {"qkv", "o", "up", "down"}
    return {matrix.key for matrix in adapted_matrices(config, adapters.targets)}


class Layer:
    """What one block keeps: its input, statistics, and the activations that are not recomputed."""

    index: int
    recompute: Recompute
    residual: Tensor  # (rows, C), the stream where the attention half begins
    residual_att: Tensor  # (rows, C), the stream where the MLP half begins
    att_out: HalfOut
    mlp_out: HalfOut
    mlp_branch: Tensor | None  # (rows, C), what the MLP half puts out, unless it adds it itself
    ln1: NormSite
    ln2: NormSite
    qkv: Activation  # (rows, Q), after qk_norm and RoPE
    qk_raw: Activation | None  # (rows, (Hq+Hkv)*Hd), before qk_norm
    qk_rstd: Tensor | None  # F32 (B, T, Hq+Hkv), of qk_norm; if it is wide (B, T, 2)
    lse: Tensor  # F32 (B, Hq, T), of attention
    att: Activation  # (rows, Hq*Hd)
    mlp_up: Activation  # (rows, F), or of a gated MLP (rows, 2F)
    mlp_act: Activation  # (rows, F)

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        options: TrainConfig,
        index: int,
        recompute: Recompute,
        stream: Stream,
    ):
        self._dev, self.index, self.recompute, self.residual = dev, index, recompute, stream.before
        self._is_fp8 = options.matmul_dtype == "e4m3"
        self._keeps_codes = self._is_fp8 and not options.lora_rank  # adapters multiply tensors
        needed = needed_inputs(config, options)
        (rows, C), B, T = self.residual.shape, options.batch_size, options.seq_len
        Hq, Hkv, Hd = config.num_heads, config.num_kv_heads, config.head_dim
        F, r, alloc, activation = config.intermediate_size, recompute, self._alloc, self._activation
        self.residual_att = stream.between if r.block else alloc("residual_att", rows, C)
        stats1 = _site_stats(dev, config, f"ln1.{index}", rows)
        stats2 = _site_stats(dev, config, f"ln2.{index}", rows)
        self.lse = alloc("lse", B, Hq, T, dtype=F32)
        # A norm behind a half needs its output in backward. Without one in front of it, its input
        # is the stream.
        pre, post = config.arch.pre_norm, config.arch.post_norm
        att_branch = alloc("att_branch", rows, C) if post and not r.block else stream.att_branch
        self.mlp_branch = alloc("mlp_branch", rows, C) if post else stream.mlp_branch
        self.att_out, self.mlp_out = HalfOut(att_branch), HalfOut(self.mlp_branch)
        if att_branch is None:
            self.att_out = HalfOut(self.residual_att, addend=self.residual)
        if self.mlp_branch is None:
            self.mlp_out = HalfOut(stream.after, addend=self.residual_att)
        # A product that is computed again in fp8 needs its input's codes as they lie, so that its
        # input is made again too.
        kept = pre and not (r.norm or (r.qkv if self._is_fp8 else r.att)) and "qkv" in needed
        ln1 = activation("ln1", C, kept=kept, may_be_codes=True)
        self.ln1 = NormSite(self.residual, stream.branch_before, *stats1, ln1)
        self.qkv = activation("qkv", config.qkv_channels, kept=not r.qkv)
        self.att = activation("att", Hq * Hd, kept=not r.att)
        kept = pre and not (r.norm or r.ffn) and "up" in needed
        ln2 = activation("ln2", C, kept=kept, may_be_codes=True)
        self.ln2 = NormSite(self.residual_att, att_branch, *stats2, ln2)
        up = E4M3 if options.mlp_dtype == "e4m3" else None
        self.mlp_up = activation("mlp_up", 2 * F if config.gated else F, kept=not r.ffn, dtype=up)
        kept = not r.swiglu and "down" in needed
        self.mlp_act = activation("mlp_act", F, kept=kept, may_be_codes=True)
        self.qk_raw = self.qk_rstd = None
        if config.qk_norm:
            self.qk_raw = activation("qk_raw", (Hq + Hkv) * Hd, kept=not r.qkv)
            norms = 2 if config.arch.wide_qk_norm else Hq + Hkv
            self.qk_rstd = alloc("qk_rstd", B, T, norms, dtype=F32)

    def _alloc(self, name: str, *shape: int, dtype: DType | None = None) -> Tensor:
        name, dtype = f"{name}.{self.index}", dtype or self.residual.dtype
        return self._dev.alloc(name, shape, dtype, "Activations")

    def _activation(
        self,
        name: str,
        features: int,
        *,
        kept: bool,
        may_be_codes: bool = False,
        dtype: DType | None = None,
    ) -> Activation:
        shape, tensor, codes = (self.residual.shape[0], features), None, None
        dtype = dtype or self.residual.dtype
        if kept and may_be_codes and self._keeps_codes:
            codes = self._alloc(f"{name}_t", *shape[::-1], dtype=E4M3)
        elif kept:
            tensor = self._alloc(name, *shape, dtype=dtype)
        return Activation(self.index, name, shape, dtype, tensor, codes)

    def slot(self, name: str) -> str:
        """The name of one of its gradients among those of all layers."""
        return slot(self.index, name)
