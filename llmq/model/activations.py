"""What a block keeps from forward to backward: options, and the tensors of one layer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from llmq.base.dtypes import F32, DType
from llmq.base.layers import layer_set
from llmq.base.tensor import Tensor
from llmq.config.model import ModelConfig
from llmq.model import norm
from llmq.model.norm import Stats
from llmq.runtime.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What is computed again in the backward pass instead of being kept; see `normalized`.

    layers: in which of them, as in llmq.base.layers.layer_set.
    """

    swiglu: bool = False
    norm: bool = False
    ffn: bool = False
    qkv: bool = False
    att: bool = False
    block: bool = False
    layers: str = "all"

    def normalized(self) -> Recompute:
        """With implications: block => att, ffn, norm; att => qkv; ffn => swiglu."""
        att, ffn = self.att or self.block, self.ffn or self.block
        return Recompute(
            swiglu=self.swiglu or ffn,
            norm=self.norm or self.block,
            ffn=ffn,
            qkv=self.qkv or att,
            att=att,
            block=self.block,
            layers=self.layers,
        )

    def of_layers(self, num_layers: int) -> list[Recompute]:
        """For each layer: this, normalized, or nothing."""
        chosen = layer_set(self.layers, num_layers)
        both = (Recompute(), self.normalized())
        return [both[layer in chosen] for layer in range(num_layers)]


def slot(layer: int, name: str) -> str:
    """The name of a block's tensor among those of all blocks."""
    return f"layers.{layer}.{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """An activation of one layer, and what is kept of it from forward to backward.

    shape: (rows, features), rows = B*T. tensor: the whole of it. codes: fp8 (features, rows), which
    are enough where backward only needs it for a weight's gradient. With neither it is scratch.
    """

    layer: int
    name: str
    shape: tuple[int, int]
    dtype: DType
    tensor: Tensor | None = None
    codes: Tensor | None = None

    @property
    def slot(self) -> str:
        """Its name among those of all layers."""
        return slot(self.layer, self.name)

    def place(self, dev: Device, temps: ExitStack) -> Tensor:
        """Where it is kept, else scratch that lives as long as temps."""
        if self.tensor is not None:
            return self.tensor
        return temps.enter_context(dev.scratch(self.name, self.shape, self.dtype))


class Norm(NamedTuple):
    """One norm of one layer: stream (rows, C) -> out."""

    stream: Tensor
    stats: Stats
    out: Activation


class Layer:
    """What one block keeps: its input, statistics, and the activations that are not recomputed."""

    index: int
    recompute: Recompute
    """Normalized."""
    residual: Tensor
    """(rows, C): the residual stream where the attention half begins."""
    residual_att: Tensor
    """(rows, C): the residual stream where the MLP half begins."""
    ln1: Norm
    qkv: Activation
    """(rows, Q): query, key and value heads, after qk_norm and RoPE."""
    qk_raw: Activation | None
    """(rows, (Hq+Hkv)*Hd): query and key heads before qk_norm, None without it."""
    qk_rstd: Tensor | None
    """F32 (B, T, Hq+Hkv): statistics of qk_norm."""
    lse: Tensor
    """F32 (B, Hq, T): statistics of attention."""
    att: Activation
    """(rows, Hq*Hd): what attention puts out."""
    ln2: Norm
    mlp_up: Activation
    """(rows, F), or of a gated MLP (rows, 2F)."""
    mlp_act: Activation
    """(rows, F)."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        index: int,
        recompute: Recompute,
        residual: Tensor,
        shared_residual_att: Tensor | None,
        fp8: DType | None,
        B: int,
        T: int,
    ):
        """shared_residual_att: of all layers whose whole block is recomputed, where it only has to
        survive until the next block's ln1. fp8: format of codes.
        """
        self.index, self.recompute, self.residual = index, recompute, residual
        rows, C = residual.shape
        Hq, Hkv, Hd = config.num_heads, config.num_kv_heads, config.head_dim
        F, r = config.intermediate_size, recompute

        def alloc(name: str, *shape: int, dtype: DType = residual.dtype) -> Tensor:
            return dev.alloc(f"{name}.{index}", shape, dtype, "Activations")

        def activation(name: str, features: int, *, kept: bool, in_fp8: bool = False) -> Activation:
            tensor = codes = None
            if kept and in_fp8:
                codes = alloc(f"{name}_t", features, rows, dtype=fp8)
            elif kept:
                tensor = alloc(name, rows, features)
            shape, dtype = (rows, features), residual.dtype
            return Activation(
                layer=index, name=name, shape=shape, dtype=dtype, tensor=tensor, codes=codes
            )

        self.residual_att = shared_residual_att if r.block else alloc("residual_att", rows, C)
        stats1 = norm.alloc_stats(dev, config, f"ln1.{index}", rows)
        stats2 = norm.alloc_stats(dev, config, f"ln2.{index}", rows)
        self.lse = alloc("lse", B, Hq, T, dtype=F32)
        # A product that is computed again in fp8 needs its input's codes as they lie, so that its
        # input is made again too.
        in_fp8 = fp8 is not None
        kept = not (r.norm or (r.qkv if in_fp8 else r.att))
        self.ln1 = Norm(residual, stats1, activation("ln1", C, kept=kept, in_fp8=in_fp8))
        self.qkv = activation("qkv", config.qkv_channels, kept=not r.qkv)
        self.att = activation("att", Hq * Hd, kept=not r.att)
        kept = not (r.norm or r.ffn)
        self.ln2 = Norm(self.residual_att, stats2, activation("ln2", C, kept=kept, in_fp8=in_fp8))
        width = 2 * F if config.activation == "swiglu" else F
        self.mlp_up = activation("mlp_up", width, kept=not r.ffn)
        self.mlp_act = activation("mlp_act", F, kept=not r.swiglu, in_fp8=in_fp8)
        self.qk_raw = self.qk_rstd = None
        if config.qk_norm:
            self.qk_raw = activation("qk_raw", (Hq + Hkv) * Hd, kept=not r.qkv)
            self.qk_rstd = alloc("qk_rstd", B, T, Hq + Hkv, dtype=F32)

    def slot(self, name: str) -> str:
        """The name of one of its gradients among those of all layers."""
        return slot(self.index, name)
