"""What a block keeps from forward to backward: options, table, and the tensors of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.base.dtypes import F32, DType
from llmq.base.tensor import Tensor
from llmq.config.model import ModelConfig
from llmq.config.option_types import layer_set
from llmq.model import norm
from llmq.runtime.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What is computed again in the backward pass instead of being kept; see `normalized`.

    layers: in which of them, as in llmq.config.option_types.layer_set.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """features: per token. kept: from forward to backward, else scratch. fp8: only its fp8 codes
    are kept, transposed, because backward only needs it for a weight's gradient.
    """

    features: int
    kept: bool
    fp8: bool = False


def activation_table(config: ModelConfig, recompute: Recompute, fp8: bool) -> dict[str, Activation]:
    """By name, in order of computation; recompute: normalized. A product that is recomputed in fp8
    needs its input's codes as they lie, so that input is recomputed too."""
    r, C, F = recompute, config.hidden_size, config.intermediate_size
    heads = config.num_heads + config.num_kv_heads
    gated = config.activation == "swiglu"
    table = {
        "ln1": Activation(features=C, kept=not (r.norm or (r.qkv if fp8 else r.att)), fp8=fp8),
        "qkv": Activation(features=config.qkv_channels, kept=not r.qkv),
        "att": Activation(features=config.num_heads * config.head_dim, kept=not r.att),
        "ln2": Activation(features=C, kept=not (r.norm or r.ffn), fp8=fp8),
        "mlp_up": Activation(features=2 * F if gated else F, kept=not r.ffn),
        "mlp_act": Activation(features=F, kept=not r.swiglu, fp8=fp8),
    }
    if config.qk_norm:
        table["qk_raw"] = Activation(features=heads * config.head_dim, kept=not r.qkv)
    return table


class Layer:
    """What one block keeps: its input, statistics, and the activations that are not recomputed."""

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
        """residual: (B*T, C). shared_residual_att: of all layers whose whole block is recomputed,
        where it only has to survive until the next block's ln1. fp8: format of codes.
        """
        self.recompute = recompute
        self.table = activation_table(config, recompute, fp8 is not None)
        rows, dtype = residual.shape[0], residual.dtype
        C, Hq, Hkv = config.hidden_size, config.num_heads, config.num_kv_heads

        def keep(name: str, *shape: int, dtype: DType = dtype) -> Tensor:
            return dev.alloc(f"{name}.{index}", shape, dtype, "Activations")

        self.residual = residual
        self.residual_att = (
            shared_residual_att if recompute.block else keep("residual_att", rows, C)
        )
        self.ln1_stats = norm.alloc_stats(dev, config, f"ln1.{index}", rows)
        self.ln2_stats = norm.alloc_stats(dev, config, f"ln2.{index}", rows)
        self.lse = keep("lse", B, Hq, T, dtype=F32)
        self.kept: dict[str, Tensor] = {}
        self.codes: dict[str, Tensor] = {}  # fp8, (features, rows)
        for name, entry in self.table.items():
            if entry.kept and entry.fp8:
                self.codes[name] = keep(f"{name}_t", entry.features, rows, dtype=fp8)
            elif entry.kept:
                self.kept[name] = keep(name, rows, entry.features)
        if config.qk_norm:
            self.kept["qk_rstd"] = keep("qk_rstd", B, T, Hq + Hkv, dtype=F32)
