"""The rules about adapters: what their options are if not given, and where they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmq.base.layers import layer_set
from llmq.options.adapters import multiplied_sizes
from llmq.options.conditions import (
    adapts_experts,
    divided_modules,
    error,
    idle_pattern,
    lacking_targets,
    not_multiple,
    too_small_for_rank,
    uncoded_base,
    wrong_for_experts,
    wrong_tables,
)
from llmq.options.loss_rules import trains_score
from llmq.options.option_types import ADAPTERS_GROUP, QUANTIZED, numbers_of
from llmq.options.rule import REFUSE, Options, Rule, default, refused


def _adapters_default(name: str, value: Callable[[Options], Any], **more: Any) -> Rule:
    return default(name, value, lambda v, o: o.has_adapters, **more)


ADAPTER_DEFAULTS = (
    # PEFT's users have these; PiSSA's authors a scaling of 1 and a tenth of the rate.
    _adapters_default(
        "lora_alpha",
        lambda o: float(o.lora_rank) * (1 if o.lora_init == "pissa" else 2),
        help="twice --lora-rank if not given, with --lora-init pissa as --lora-rank",
    ),
    default(
        "learning_rate",
        lambda o: (2e-5 if o.lora_init == "pissa" else 2e-4) if o.wants_adapters else 1e-5,
        help="1e-5 if not given, with adapters 2e-4, with --lora-init pissa 2e-5",
    ),
    _adapters_default("lora_targets", lambda o: "all", help="all if not given"),
    _adapters_default("lora_dropout", lambda o: 0.0, help="0 if not given"),
    _adapters_default("lora_scaling", lambda o: "standard", help="standard, if not given"),
    _adapters_default("lora_init", lambda o: "zero", help="zero, if not given"),
    default(
        "base_dtype",
        lambda o: o.model_dtype,
        lambda v, o: o.freezes_model,
        help="as --model-dtype if not given",
    ),
    _adapters_default(
        "train",
        lambda o: ("head",) if trains_score(o) else ("new-rows",) if o.add_tokens else (),
        help="with --add-tokens new-rows, with --head score head, if not given",
    ),
)

ADAPTERS_REFUSED = (
    *refused(
        "adapter",
        lambda v, o: v is not None and o.from_scratch,
        "--adapter: needs the model that it adapts, not --from-scratch",
    ),
    *refused(
        "lora_init",
        lambda v, o: v == "pissa" and o.adapter is not None,
        "--lora-init: pissa does not go with --adapter, whose adapters have begun already",
    ),
    *refused(
        "lora_init",
        lambda v, o: v == "pissa" and o.from_scratch,
        "--lora-init: pissa takes the adapters from a model that was trained, not from the random "
        "one of --from-scratch",
    ),
    Rule(
        group=ADAPTERS_GROUP,
        effect=REFUSE,
        when=lambda v, o: not o.wants_adapters and not o.only_scores,
        text="{flag}: needs --lora-rank",
    ),
    *refused(
        "lora_rank_pattern lora_alpha_pattern",
        lambda v, o: any(not number for _, number in numbers_of(v, float)),
        "{flag}: must be greater than 0, got {value}",
    ),
    *refused(
        "lora_rank_pattern",
        lambda v, o: error(numbers_of, v, int),
        "{flag}: a rank is a whole number, got {value}",
    ),
    *refused(
        "lora_rank_pattern lora_alpha_pattern",
        lambda v, o: v and o.lora_init == "pissa",
        "{flag}: --lora-init pissa has one rank and one scaling",
    ),
    *refused(
        "lora_dora",
        lambda v, o: v and o.lora_dropout,
        "--lora-dora: has no --lora-dropout: it would take a product of the model with dropped "
        "inputs beside that with all",
    ),
    *refused(
        "lora_dora",
        lambda v, o: v and o.lora_init == "pissa",
        "--lora-dora: does not go with --lora-init pissa",
    ),
    *refused(
        "lora_dora",
        lambda v, o: v and o.has_adapters and o.matmul_dtype != o.model_dtype,
        "--lora-dora: its products are in the model's format: leave --matmul-dtype out",
    ),
    *refused(
        "lora_dropout",
        lambda v, o: v is not None and v >= 1,
        "--lora-dropout: must be less than 1, got {value}",
    ),
    *refused(
        "lora_alpha lora_plus",
        lambda v, o: v is not None and v <= 0,
        "{flag}: must be greater than 0, got {value}",
    ),
    *refused(
        "base_dtype",
        lambda v, o: (
            o.freezes_model
            and v not in (allowed := (o.model_dtype, *QUANTIZED))
            and " or ".join(allowed)
        ),
        "--base-dtype: {value} does not go with --model-dtype {model_dtype}, use {found}",
    ),
)

ADAPTERS_REFUSED_WITH_MODEL = (
    *refused(
        "adapter",
        lambda v, o, model: v is not None and not o.has_adapters,
        "--adapter: is not read here: give --lora-rank instead",
    ),
    *refused(
        "lora_layers",
        lambda v, o, model: o.has_adapters and error(layer_set, v, model.num_layers),
        "--lora-layers: {found}",
    ),
    *refused(
        "lora_dora",
        lambda v, o, model: v and o.has_adapters and adapts_experts(o, model),
        "--lora-dora: adapters of experts have no magnitudes: leave experts out of --lora-targets",
    ),
    *refused(
        "lora_targets",
        lambda v, o, model: divided_modules(o, model),
        "{found}",
    ),
    *refused(
        "lora_targets",
        lambda v, o, model: lacking_targets(o, model),
        "--lora-targets: {model.architecture} has no {found}",
    ),
    *refused(
        "lora_targets",
        lambda v, o, model: wrong_tables(o, model),
        "--lora-targets: {found}",
    ),
    *refused(
        "lora_rank_pattern lora_alpha_pattern",
        lambda v, o, model: idle_pattern(o, model, v),
        "{flag}: no module with adapters is called {found}",
    ),
    *refused("lora_targets", lambda v, o, model: wrong_for_experts(o, model), "{found}"),
    *refused(
        "lora_rank",
        lambda v, o, model: too_small_for_rank(o, model),
        "--lora-rank: {found[rank]} is larger than the matrix of {found[module]}, {found[rows]} x "
        "{found[columns]}: {found[way]}",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: (
            o.is_quantized and v == "int8" and not_multiple(multiplied_sizes(model), 16)
        ),
        "--base-dtype: int8 needs multiples of 16, but the {found[0]} is {found[1]}",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: o.is_quantized and v == "mxfp4" and model.experts is None,
        "--base-dtype: mxfp4 is for experts, which {model.architecture} has not: use nf4",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: uncoded_base(o, model),
        "--base-dtype: {value} needs matrices of multiples of {found[2]} elements, that of "
        "{found[0]} has {found[1]}",
    ),
)
