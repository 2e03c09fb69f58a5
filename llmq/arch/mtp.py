"""Heads for multi-token prediction (MTP): one transformer block that predicts the token after the
next token.

    x = fc [norm(embedding of the next token) | norm(output of the trunk's final norm)]
    x -> a block -> norm -> the trunk's LM head

An MTP head shares the embedding and the LM head of the trunk, the model's other blocks.
`block_config` describes the block as a model of one layer; an architecture declares only the names
of the tensors in files.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from llmq.arch.matrix import Matrix, Module, Part

MTP = "mtp"
"""Name of the head as a block of the weight table, as a slab, and as a value of --train."""


class MtpNames(NamedTuple):
    """Names of an MTP head's modules in files; {} stands for the number of the trunk's layers.
    layer: prefix of the names of the block's modules."""

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
"""Names of a head that files of DeepSeek and GLM store as one more layer after the trunk's
layers."""


def block_config(config: Any) -> Any:
    """Return the ModelConfig of a model whose only layer and final norm are those of the head.
    config: the ModelConfig of the trunk."""
    experts = None if config.experts is None else replace(config.experts, layers=None)
    return replace(config, num_layers=1, mixers=None, experts=experts)


def mtp_modules(config: Any) -> tuple[Module, ...]:
    """Return the modules of an MTP head: the modules of its block, `fc` (C, 2C), and three norms
    (C,), for C channels."""
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
    """Return a module of layer 0 with the names that it has in files as part of an MTP head."""

    def own(name: str) -> str:
        return name.replace("model.layers.0", layer, 1)

    parts = tuple(replace(part, module=own(part.module)) for part in module.parts)
    found = replace(module, name=own(module.name), parts=parts)
    fused = getattr(module, "fused", None)
    if fused is None:
        return found
    return replace(found, fused=replace(fused, module=own(fused.module)))
