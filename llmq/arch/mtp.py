"""Heads for multi-token prediction (MTP): one block that guesses the token after the next one.

    x = fc [norm(embedding of the next token) | norm(output of the trunk's final norm)]
    x -> a block -> norm -> the trunk's LM head

Embedding and LM head are the trunk's. `block_config` describes the block as a model of one layer;
an architecture only declares the names of the tensors in files.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from llmq.arch.matrix import Matrix, Module, Part

MTP = "mtp"
"""Name of the head as a block of the weight table, as a slab, and in --train."""


class MtpNames(NamedTuple):
    """Modules of an MTP head in files; {} stands for the number of the trunk's layers. layer: the
    prefix of the block's modules."""

    layer: str
    fc: str
    embedding: str
    hidden: str
    norm: str


QWEN = MtpNames(
    "mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
)
BEHIND = MtpNames(
    *(f"model.layers.{{}}{end}" for end in ("", ".eh_proj", ".enorm", ".hnorm")),
    "model.layers.{}.shared_head.norm",
)
"""Names of a head stored as one more layer behind the trunk's, as in files of DeepSeek and GLM."""


def block_config(config: Any) -> Any:
    """The ModelConfig of one layer whose block and final norm the head has. config: the trunk's
    ModelConfig."""
    experts = None if config.experts is None else replace(config.experts, layers=None)
    return replace(config, num_layers=1, mixers=None, experts=experts)


def mtp_modules(config: Any) -> tuple[Module, ...]:
    """The modules of an MTP head: the block's, `fc` (C, 2C), and three norms (C,)."""
    names = MtpNames(*(name.format(config.num_layers) for name in config.arch.mtp))
    own, C = block_config(config), config.hidden_size
    (of_model,) = (m for m in config.arch.head(config) if m.key == "norm")

    def norm(key: str, module: str) -> Module:
        return replace(of_model, key=key, name=module, parts=(Part(module=module, rows=C),))

    fc = Matrix(
        key="fc", name=names.fc, shape=(C, 2 * C), parts=(Part(module=names.fc, rows=C),),
        input="joined", gradient="d_residual",
    )  # fmt: skip
    block = [m for half in own.halves(0) for m in (*half.norms, *half.modules)]
    return (
        norm("norm_embedding", names.embedding),
        norm("norm_hidden", names.hidden),
        fc,
        *(_renamed(module, names.layer) for module in block),
        norm("norm", names.norm),
    )


def _renamed(module: Module, layer: str) -> Module:
    """A module of layer 0 under its names in an MTP head's files."""

    def own(name: str) -> str:
        return name.replace("model.layers.0", layer, 1)

    parts = tuple(replace(part, module=own(part.module)) for part in module.parts)
    found = replace(module, name=own(module.name), parts=parts)
    fused = getattr(module, "fused", None)
    if fused is None:
        return found
    return replace(found, fused=replace(fused, module=own(fused.module)))
