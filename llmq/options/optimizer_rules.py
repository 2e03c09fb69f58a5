"""The rules about the optimizer and its rates: what its options are if not given, refused, idle."""

from __future__ import annotations

from collections.abc import Iterator

from llmq.options.rule import Rule, default, idle, refused

_LEAST_EPSILON = 2.0**-126  # of AdamW: the smallest F32 that every GPU tells from 0


def _untrained(name: str, *parts: str) -> Iterator[Rule]:
    """The rate of parts of the model, which only --train trains beside adapters."""
    return idle(
        name,
        lambda v, o: o.wants_adapters and not {*parts} & {*(o.train or ())},
        f"{{given}} has no effect beside adapters without --train={parts[0]}",
    )


OPTIMIZER_RULES = (
    default(
        "muon_lr",
        lambda o: o.learning_rate if o.muon_scale == "match-rms" else 0.02,
        lambda v, o: o.optimizer == "muon",
        help="as --learning-rate if not given, with another --muon-scale than match-rms 0.02",
    ),
    *refused(
        "beta_1 beta_2 muon_momentum muon_normalize_rows ema",
        lambda v, o: v >= 1,
        "{flag}: must be less than 1, got {value}",
    ),
    *refused(
        "optimizer",
        lambda v, o: v == "muon" and o.wants_adapters,
        "--optimizer: muon is for the matrices of blocks, which stay as they are beside adapters",
    ),
    *refused(
        "muon_lr lr_embedding lr_head lr_vectors",
        lambda v, o: v is not None and o.learning_rate == 0,
        "{flag}: takes the course of --learning-rate, which must be more than 0",
    ),
    *refused(
        "adam_epsilon",
        lambda v, o: v < _LEAST_EPSILON,
        "--adam-epsilon: must be greater than 0 (in F32, at least 1.2e-38), else the update of a "
        "weight without gradients is 0 / 0, got {value}",
    ),
    *refused(
        "cooldown",
        lambda v, o: 0 <= o.steps < o.cooldown_of(o.steps),
        "--cooldown: {value} steps are more than the {steps} of the whole run: use fewer, or train "
        "for longer",
    ),
    *refused(
        "cooldown",
        lambda v, o, total: o.cooldown_of(total) > total,
        "--cooldown: {value} steps are more than the {total} of the whole run: use fewer, or train "
        "for longer",
    ),
    *_untrained("lr_embedding", "embeddings"),
    *_untrained("lr_head", "head"),
    *_untrained("lr_vectors", "norms", "biases", "adapted-biases"),
    *idle(
        "lr_head",
        lambda v, o, model: model.tied_embeddings,
        "{given} has no effect: this model's LM head is its token table, see --lr-embedding",
    ),
    *idle(
        "final_lr_fraction",
        lambda v, o: o.lr_schedule == "wsd",
        "--final-lr-fraction has no effect with --lr-schedule wsd",
    ),
    *idle(
        "muon_lr muon_momentum muon_scale muon_coefficients muon_normalize_rows cautious_decay",
        lambda v, o: o.optimizer != "muon",
        "{given} has no effect without --optimizer muon",
    ),
    *idle("offload_ema", lambda v, o: v and not o.ema, "--offload-ema has no effect without --ema"),
    *idle(
        "cautious_decay",
        lambda v, o: v and o.weight_decay == 0,
        "--cautious-decay has no effect with --weight-decay 0",
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
        "--lr-schedule wsd has no effect: without --cooldown the learning rate does not change",
    ),
    *idle(
        "steps",
        lambda v, o: 0 <= v < o.warmup + o.cooldown_of(v),
        "--warmup {warmup} and --cooldown {cooldown} do not fit into --steps {value}",
    ),
)
"""Rules that know nothing but the options."""
