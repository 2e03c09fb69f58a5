"""Qwen3-Next: attention and delta nets of Qwen3.5, and experts in all layers or in some."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from llmq.arch.common import GgufKind
from llmq.arch.delta import DeltaNet
from llmq.arch.experts import WithExperts
from llmq.arch.matrix import HalfSpec, Order, Part
from llmq.arch.qwen3_5 import Qwen35

_AT = "model.layers.{}.linear_attn.in_proj_{}"


class Qwen3Next(WithExperts, Qwen35):
    """Qwen3-Next: the input product of a delta net is two modules, with rows stored by key head."""

    name = "Qwen3NextForCausalLM"
    classifier = "Qwen3NextForSequenceClassification"
    model_type = "qwen3_next"
    wrapper = None
    label = "Qwen3-Next"
    gguf = GgufKind("qwen3next", heads=True, renormalize=True)
    targets = tuple(dict.fromkeys((*WithExperts.targets, *Qwen35.targets)))
    shares = True

    def layers(self, model: Any, layer: int) -> tuple[HalfSpec, ...]:
        first, second = super().layers(model, layer)
        if model.has_mixer(layer):
            delta_in, *others = first.modules
            joint = replace(delta_in, parts=_joint_parts(model.mixers, layer))
            first = replace(first, modules=(joint, *others))
        return first, second

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes; experts' weights are renormalized unless config.json says otherwise."""
        return super().read_sizes({"norm_topk_prob": True} | {**hf})


def _joint_parts(net: DeltaNet, layer: int) -> tuple[Part, ...]:
    """Return the two parts of delta_in: the rows of q, k, v and z, one key head after another, and
    the rows of b and a."""
    keys, each = net.key_heads * net.key_dim, net.value_heads
    rows = {"qkvz": (keys, keys, net.values, net.values), "ba": (each, each)}
    targets = {"qkvz": ("delta_qkv", "delta_z"), "ba": ("delta_b", "delta_a")}
    return tuple(
        Part(
            module=_AT.format(layer, name),
            rows=sum(sections),
            targets=targets[name],
            order=_by_head(sections, net.key_heads),
        )
        for name, sections in rows.items()
    )


def _by_head(sections: tuple[int, ...], heads: int) -> Order:
    starts = [*accumulate(sections, initial=0)][:-1]
    shares = [(start, rows // heads) for start, rows in zip(starts, sections, strict=True)]
    return tuple(
        (start + head * rows, start + (head + 1) * rows)
        for head in range(heads)
        for start, rows in shares
    )
