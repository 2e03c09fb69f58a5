"""The rules about the optimizer, losses and adapters: what their options are if not given, where
they are refused, and idle.
"""

from collections.abc import Callable
from typing import Any

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
from llmq.options.loss_params import LOSS_PARAMS, complete_params, loss_values, part_rates
from llmq.options.option_types import ADAPTERS_GROUP, MUONS, QUANTIZED, layer_set, numbers_of
from llmq.options.rule import IMPLY, REFUSE, Options, Rule, default, each, idle, refused

_LEAST_EPSILON = 2.0**-126  # of AdamW: the smallest F32 that every GPU tells from 0


_TRAINED_BY = {
    "embedding": ("embeddings",),
    "head": ("head",),
    "vectors": ("norms", "biases", "adapted-biases"),
}
"""Words of --train by which the parts of --lr-parts are trained beside adapters."""


def _untrained(o: Options) -> str | None:
    """Line about the first rate of --lr-parts whose part is not trained beside adapters."""
    for text in o.lr_parts if o.wants_adapters else ():
        names = _TRAINED_BY.get(text.partition("=")[0], ())
        if names and not {*names} & {*(o.train or ())}:
            return f"{text} has no effect beside adapters without --train={names[0]}"
    return None


OPTIMIZER_RULES = (
    # A schedule that is named falls; llm.q's constant rate is a cosine to the rate itself.
    default(
        "cooldown",
        lambda o: 0.2 if o.lr_schedule == "wsd" else 0,
        help="0 if not given, with --lr-schedule wsd 20%",
    ),
    default(
        "final_lr_fraction",
        lambda o: 0.0 if o.lr_schedule in ("cosine", "linear") else 1.0,
        help="0 if only --lr-schedule is given, 1 if neither is",
    ),
    default(
        "lr_schedule",
        lambda o: "cosine",
        help="if neither this nor --final-lr-fraction is given the rate is constant",
    ),
    default(
        "muon_lr",
        lambda o: o.learning_rate,
        lambda v, o: o.optimizer in MUONS,
        help="as --learning-rate if not given",
    ),
    *refused(
        "optimizer",
        lambda v, o: v in MUONS and o.wants_adapters,
        "{value} is for the matrices of blocks, which stay as they are beside adapters",
    ),
    *refused(
        "muon_lr lr_parts",
        lambda v, o: v not in (None, ()) and o.learning_rate == 0,
        "takes the course of --learning-rate, which must be more than 0",
    ),
    *refused(
        "adam_epsilon",
        lambda v, o: v < _LEAST_EPSILON,
        "must be greater than 0 (in F32, at least 1.2e-38), else the update of a "
        "weight without gradients is 0 / 0, got {value}",
    ),
    *refused(
        "cooldown",
        lambda v, o: 0 <= o.steps < o.cooldown_of(o.steps),
        "{value} steps are more than the {steps} of the whole run: use fewer, or train for longer",
    ),
    *refused(
        "cooldown",
        lambda v, o, total: o.cooldown_of(total) > total,
        "{value} steps are more than the {total} of the whole run: use fewer, or train for longer",
    ),
    *each("lr_parts", REFUSE, lambda v, o: error(part_rates, v), "{found}"),
    *idle("lr_parts", lambda v, o: _untrained(o), "--lr-parts {found}"),
    *idle(
        "lr_parts",
        lambda v, o, model: model.tied_embeddings and part_rates(v).get("head"),
        "--lr-parts head={found:g} has no effect: this model's LM head is its token table, give "
        "embedding",
    ),
    *idle(
        "final_lr_fraction",
        lambda v, o: v != 1 and o.lr_schedule == "wsd",
        "--final-lr-fraction has no effect with --lr-schedule wsd, whose --cooldown ends at 0",
    ),
    *idle(
        "muon_lr",
        lambda v, o: o.optimizer not in MUONS,
        "has no effect without --optimizer muon",
    ),
    *idle(
        "lr_schedule",
        lambda v, o: v == "linear" and o.final_lr_fraction == 1,
        "--lr-schedule linear has no effect: with --final-lr-fraction 1 the learning rate does not "
        "change",
    ),
    *idle(
        "lr_schedule",
        lambda v, o: v == "wsd" and o.cooldown == 0,
        "--lr-schedule wsd has no effect: with --cooldown 0 the learning rate does not change",
    ),
    *idle(
        "steps",
        lambda v, o: 0 <= v < o.warmup_of(v) + o.cooldown_of(v),
        "--warmup {warmup} and --cooldown {cooldown} do not fit into --steps {value}",
    ),
)
"""Rules that know nothing but the options."""


# ------------------------------------------------------------------------------------------------
# Losses


LOSS_RULES = (
    default(
        "num_labels",
        lambda o: 1,
        lambda v, o: o.loss == "reward",
        help="with --loss reward one score",
    ),
    *refused(
        "num_labels",
        lambda v, o: v is not None and o.loss not in ("ce", "reward"),
        "does not go with --loss {loss}: a score head learns classes (--loss ce) or pairs "
        "(--loss reward)",
    ),
    default("long", lambda o: "drop", lambda v, o: o.head == "score" and not o.pairs),
    *each(
        "long",
        REFUSE,
        lambda v, o: o.head == "score" and not o.pairs and v != "drop",
        "--long {value}: a score head reads whole documents, whose labels stand behind them: give "
        "drop",
    ),
    *refused(
        "head_dtype",
        lambda v, o: o.head == "score" and v == "e4m3",
        "a score head is too small for e4m3: use bf16",
    ),
    *refused(
        "z_loss",
        lambda v, o: o.head == "score" and v > 0,
        "is for logits of tokens, and a score head has none",
    ),
    *each(
        "packing",
        REFUSE,
        lambda v, o: o.head == "score" and (v == "concat" or not o.document_mask),
        "--num-labels: windows of the files would cut documents, which have one label each: give "
        "--packing best-fit or none, without --no-document-mask",
    ),
    *refused(
        "num_labels",
        lambda v, o: v is not None and (v > 1) != (o.loss == "ce") and o.head == "score",
        "{value} with --loss {loss}: a reward is one number, and classes are at least 2",
    ),
    *refused(
        "eval_task sample_prompt",
        lambda v, o: v and o.head == "score",
        "a model with a score head predicts no tokens",
    ),
    *refused(
        "add_tokens",
        lambda v, o: v is not None and o.head == "score" and o.wants_adapters,
        "rows of new tokens are trained beside adapters for a head of tokens only",
    ),
    Rule(
        option="loss_params",
        effect=IMPLY,
        when=lambda v, o: o.loss in LOSS_PARAMS,
        sets=lambda o: {"loss_params": complete_params(o.loss, o.loss_params)},
    ),
    *each("loss_params", REFUSE, lambda v, o: error(loss_values, o.loss, v), "{found}"),
    *each(
        "packing",
        REFUSE,
        lambda v, o: o.pairs and (v == "concat" or not o.document_mask),
        "--loss {loss}: windows of the files would cut pairs, and an answer would see the other "
        "one: give --packing best-fit or none, without --no-document-mask",
    ),
    *each(
        "head_dtype",
        REFUSE,
        lambda v, o: (o.loss != "ce" or o.token_weights) and v == "e4m3",
        "--loss {loss}: an fp8 head rounds the weights of rows to within 1/8: use --head-dtype "
        "bf16",
    ),
    *refused(
        "z_loss",
        lambda v, o: (o.loss != "ce" or o.token_weights) and v > 0,
        "would be weighted as tokens are, of which --loss {loss} makes some less likely",
    ),
    # About token files: batches of a caller's own bring scores and masks with them.
    *each(
        "scores",
        REFUSE,
        lambda v, o, files: v is None and o.loss == "weighted",
        "--loss weighted: needs --scores, a directory of files with a weight for each token",
    ),
    *each(
        "scores",
        REFUSE,
        lambda v, o, files: v is None and o.loss == "kd",
        "--loss kd: needs --scores of a teacher, which `llmq score` makes of the "
        "{loss_values[top-k]} most likely tokens",
    ),
    *each(
        "loss",
        REFUSE,
        lambda v, o, model: v == "kd" and model.logit_softcap is not None,
        "--loss kd: is computed from logits without a soft cap, and this model has one",
    ),
    *refused(
        "loss_params",
        lambda v, o, model: o.loss == "kd" and o.loss_values["top-k"] > model.vocab_size,
        "top-k={loss_values[top-k]} is more than the vocabulary of {model.vocab_size}",
    ),
    *each(
        "document_mask",
        REFUSE,
        lambda v, o, files: not v and o.loss in ("kd", "weighted"),
        "--loss {loss}: documents are scored one by one: give --packing best-fit, or "
        "--document-mask",
    ),
    *each(
        "scores",
        REFUSE,
        lambda v, o, files: v is None and o.has_reference and o.adapter is not None,
        "--loss {loss}: the reference of a run that goes on from --adapter is the model without: "
        "score it with `llmq score`, and give --scores",
    ),
    *idle(
        "scores",
        lambda v, o: o.scores_folder is None,
        "has no effect with --loss {loss}, which reads none",
    ),
    *idle(
        "lora_rank lora_alpha lora_targets lora_layers lora_rank_pattern lora_alpha_pattern "
        "lora_dora lora_dropout lora_scaling lora_plus train",
        lambda v, o: o.only_scores,
        "has no effect: a model is scored without adapters",
    ),
    *idle(
        "long",
        lambda v, o: o.pairs,
        "--long {value} has no effect with --loss {loss}: pairs are never cut",
        last_word=True,
    ),
)


# ------------------------------------------------------------------------------------------------
# Adapters


def _adapters_default(name: str, value: Callable[[Options], Any], **more: Any) -> Rule:
    return default(name, value, lambda v, o: o.has_adapters, **more)


ADAPTER_DEFAULTS = (
    _adapters_default(  # PEFT's users have these two
        "lora_alpha", lambda o: 2.0 * o.lora_rank, help="twice --lora-rank if not given"
    ),
    default(
        "learning_rate",
        lambda o: 2e-4 if o.wants_adapters else 1e-5,
        help="1e-5 if not given, with adapters 2e-4",
    ),
    _adapters_default("lora_targets", lambda o: "all", help="all if not given"),
    _adapters_default("lora_dropout", lambda o: 0.0, help="0 if not given"),
    _adapters_default("lora_scaling", lambda o: "standard", help="standard, if not given"),
    default(
        "base_dtype",
        lambda o: o.model_dtype,
        lambda v, o: o.freezes_model,
        help="as --model-dtype if not given",
    ),
    _adapters_default(
        "train",
        lambda o: ("head",) if o.head == "score" else ("new-rows",) if o.add_tokens else (),
        help="with --add-tokens new-rows, with a score head head, if not given",
    ),
)

ADAPTERS_REFUSED = (
    *refused(
        "adapter",
        lambda v, o: v is not None and o.from_scratch,
        "needs the model that it adapts, not --from-scratch",
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
        "must be greater than 0, got {value}",
    ),
    *refused(
        "lora_rank_pattern",
        lambda v, o: error(numbers_of, v, int),
        "a rank is a whole number, got {value}",
    ),
    *refused(
        "lora_dora",
        lambda v, o: v and o.lora_dropout,
        "has no --lora-dropout: it would take a product of the model with dropped "
        "inputs beside that with all",
    ),
    *refused(
        "lora_dora",
        lambda v, o: v and o.has_adapters and o.matmul_dtype != o.model_dtype,
        "its products are in the model's format: leave --matmul-dtype out",
    ),
    *refused(
        "base_dtype",
        lambda v, o: (
            o.freezes_model
            and v not in (allowed := (o.model_dtype, *QUANTIZED))
            and " or ".join(allowed)
        ),
        "{value} does not go with --model-dtype {model_dtype}, use {found}",
    ),
)

ADAPTERS_REFUSED_WITH_MODEL = (
    *refused(
        "adapter",
        lambda v, o, model: v is not None and not o.has_adapters,
        "is not read here: give --lora-rank instead",
    ),
    *refused(
        "lora_layers",
        lambda v, o, model: o.has_adapters and error(layer_set, v, model.num_layers),
        "{found}",
    ),
    *refused(
        "lora_dora",
        lambda v, o, model: v and o.has_adapters and adapts_experts(o, model),
        "adapters of experts have no magnitudes: leave experts out of --lora-targets",
    ),
    *each("lora_targets", REFUSE, lambda v, o, model: divided_modules(o, model), "{found}"),
    *refused(
        "lora_targets",
        lambda v, o, model: lacking_targets(o, model),
        "{model.architecture} has no {found}",
    ),
    *refused("lora_targets", lambda v, o, model: wrong_tables(o, model), "{found}"),
    *refused(
        "lora_rank_pattern lora_alpha_pattern",
        lambda v, o, model: idle_pattern(o, model, v),
        "no module with adapters is called {found}",
    ),
    *each("lora_targets", REFUSE, lambda v, o, model: wrong_for_experts(o, model), "{found}"),
    *refused(
        "lora_rank",
        lambda v, o, model: too_small_for_rank(o, model),
        "{found[rank]} is larger than the matrix of {found[module]}, {found[rows]} x "
        "{found[columns]}: {found[way]}",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: (
            o.is_quantized and v == "int8" and not_multiple(multiplied_sizes(model), 16)
        ),
        "int8 needs multiples of 16, but the {found[0]} is {found[1]}",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: o.is_quantized and v == "mxfp4" and model.experts is None,
        "mxfp4 is for experts, which {model.architecture} has not: use nf4",
    ),
    *refused(
        "base_dtype",
        lambda v, o, model: uncoded_base(o, model),
        "{value} needs matrices of multiples of {found[2]} elements, that of "
        "{found[0]} has {found[1]}",
    ),
)
