"""The rules about losses: what their options are if not given, where they are refused, and idle."""

from __future__ import annotations

from typing import Any

from llmq.options.rule import Options, Rule, default, idle, refused


def _by_loss(name: str, values: dict[str, Any], **more: Any) -> Rule:
    """values: if not given, by loss; the others have none."""
    return default(name, lambda o: values.get(o.loss), lambda v, o: o.loss in values, **more)


def trains_score(o: Options) -> bool:
    """Whether there is a score head; also before it is implied."""
    return o.head == "score" or o.loss == "reward"


LOSS_RULES = (
    default(
        "head",
        lambda o: "score" if trains_score(o) else "lm",
        help="lm, if not given; with --loss reward score",
    ),
    default(
        "num_labels",
        lambda o: 1 if o.loss == "reward" else 2,
        lambda v, o: o.head == "score",
        help="1 if not given with --loss reward, else 2",
    ),
    *refused(
        "head",
        lambda v, o: (v == "score") != (o.loss == "reward") and o.loss != "ce",
        "--head {value} does not go with --loss {loss}: a score head learns labels (--loss ce) or "
        "pairs (--loss reward)",
    ),
    default(
        "long",
        lambda o: "drop",
        lambda v, o: o.head == "score" and not o.pairs,
    ),
    *refused(
        "long",
        lambda v, o: o.head == "score" and not o.pairs and v != "drop",
        "--long {value}: --head score reads whole documents, whose labels stand behind them: give "
        "drop",
    ),
    *refused(
        "head_dtype",
        lambda v, o: o.head == "score" and v == "e4m3",
        "--head-dtype: a score head is too small for e4m3: use bf16",
    ),
    *refused(
        "z_loss",
        lambda v, o: o.head == "score" and v > 0,
        "--z-loss: is for logits of tokens, and --head score has none",
    ),
    *refused(
        "packing",
        lambda v, o: o.head == "score" and (v == "concat" or not o.document_mask),
        "--head score: windows of the files would cut documents, which have one label each: give "
        "--packing best-fit or none, without --no-document-mask",
    ),
    *refused(
        "num_labels",
        lambda v, o: v is not None and (v > 1) != (o.loss == "ce") and o.head == "score",
        "--num-labels: {value} with --loss {loss}: a reward is one number, and classes are at "
        "least 2",
    ),
    *refused(
        "token_weights",
        lambda v, o: v and (o.loss != "ce" or o.head == "score"),
        "--token-weights: does not go with --loss {loss} --head {head}: give --no-token-weights, "
        "and only whether a token is trained counts",
    ),
    *refused(
        "eval_task sample_prompt",
        lambda v, o: v and o.head == "score",
        "{flag}: a model with --head score predicts no tokens",
    ),
    *refused(
        "add_tokens",
        lambda v, o: v is not None and o.head == "score" and o.wants_adapters,
        "--add-tokens: rows of new tokens are trained beside adapters for a head of tokens only",
    ),
    _by_loss(
        "pref_beta",
        {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1},
        help="0.1 if not given, of simpo 2",
    ),
    _by_loss("pref_gamma", {"simpo": 0.5}, help="0.5 if not given"),
    _by_loss("pref_smoothing", {"dpo": 0.0, "simpo": 0.0}, help="0 if not given"),
    _by_loss(
        "pref_normalize",
        {"dpo": False, "ipo": True, "simpo": True, "orpo": True},
        help="if not given off with dpo, else on",
    ),
    _by_loss(
        "pref_sft",
        {"dpo": 0.0, "ipo": 0.0, "simpo": 0.0, "orpo": 1.0},
        help="0 if not given, of orpo 1",
    ),
    *refused(
        "packing",
        lambda v, o: o.pairs and (v == "concat" or not o.document_mask),
        "--loss {loss}: windows of the files would cut pairs, and an answer would see the other "
        "one: give --packing best-fit or none, without --no-document-mask",
    ),
    *refused(
        "head_dtype",
        lambda v, o: (o.loss != "ce" or o.token_weights) and v == "e4m3",
        "--loss {loss}: an fp8 head rounds the weights of rows to within 1/8: use --head-dtype "
        "bf16",
    ),
    *refused(
        "z_loss",
        lambda v, o: (o.loss != "ce" or o.token_weights) and v > 0,
        "--z-loss: would be weighted as tokens are, of which --loss {loss} makes some less likely",
    ),
    *refused("pref_beta", lambda v, o: v == 0, "--pref-beta: must be more than 0"),
    *refused(
        "pref_smoothing",
        lambda v, o: v is not None and v >= 0.5,
        "--pref-smoothing: must be less than 0.5, got {value}",
    ),
    *refused(
        "scores",
        lambda v, o: v is None and o.loss == "weighted",
        "--loss weighted: needs --scores, a directory of files with a weight for each token",
    ),
    *refused(
        "scores",
        lambda v, o: v is None and o.loss == "kd",
        "--loss kd: needs --scores of a teacher, which `llmq score` makes of the {kd_top_k} most "
        "likely tokens",
    ),
    *refused(
        "kd_top_k",
        lambda v, o, model: o.loss == "kd" and v > model.vocab_size,
        "--kd-top-k: {value} is more than the vocabulary of {model.vocab_size}",
    ),
    *refused("kd_temperature", lambda v, o: v <= 0, "--kd-temperature: must be more than 0"),
    *refused(
        "document_mask",
        lambda v, o: not v and o.loss in ("kd", "weighted"),
        "--loss {loss}: documents are scored one by one: give --packing best-fit, or "
        "--document-mask",
    ),
    *refused(
        "scores",
        lambda v, o: v is None and o.has_reference and o.adapter is not None,
        "--loss {loss}: the reference of a run that goes on from --adapter is the model without: "
        "score it with `llmq score`, and give --scores",
    ),
    *idle(
        "pref_sft pref_normalize",
        lambda v, o: o.pairs != "answers" or o.loss == "reward",
        "{given} has no effect with --loss {loss}",
    ),
    *idle(
        "pref_beta",
        lambda v, o: not o.pairs or o.loss == "reward",
        "{given} has no effect with --loss {loss}",
    ),
    *idle("num_labels", lambda v, o: o.head != "score", "{given} is for --head score"),
    *idle(
        "kd_top_k kd_mixture kd_temperature kd_divergence",
        lambda v, o: o.loss != "kd",
        "{given} is for --loss kd",
    ),
    *idle(
        "kto_desirable kto_undesirable", lambda v, o: o.loss != "kto", "{given} is for --loss kto"
    ),
    *idle(
        "pref_normalize",
        lambda v, o: o.loss == "orpo" and not v,
        "--no-pref-normalize has no effect with --loss orpo, which compares means",
    ),
    *idle("pref_gamma", lambda v, o: o.loss != "simpo", "{given} is for --loss simpo"),
    *idle(
        "pref_smoothing",
        lambda v, o: o.loss not in ("dpo", "simpo"),
        "{given} is for --loss dpo and simpo",
    ),
    *idle(
        "scores",
        lambda v, o: o.scores_folder is None,
        "{given} has no effect with --loss {loss}, which reads none",
    ),
    *idle(
        "lora_rank lora_alpha lora_targets lora_layers lora_rank_pattern lora_alpha_pattern "
        "lora_dora lora_dropout lora_scaling lora_init lora_plus train",
        lambda v, o: o.only_scores,
        "{given} has no effect: a model is scored without adapters",
    ),
    *idle(
        "long",
        lambda v, o: o.pairs,
        "--long {value} has no effect with --loss {loss}: pairs are never cut",
        last_word=True,
    ),
)
