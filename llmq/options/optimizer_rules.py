"""The rules about the optimizer and its rates: what its options are if not given, refused, idle."""

from __future__ import annotations

from llmq.options.rule import default, idle, refused

_LEAST_EPSILON = 2.0**-126  # of AdamW: the smallest F32 that every GPU tells from 0

OPTIMIZER_RULES = (
    default(
        "muon_lr",
        lambda o: o.learning_rate if o.muon_scale == "match-rms" else 0.02,
        lambda v, o: o.optimizer == "muon",
        help="as --learning-rate if not given, with another --muon-scale than match-rms 0.02",
    ),
    *refused(
        "beta_1 beta_2 muon_momentum",
        lambda v, o: v >= 1,
        "{flag}: must be less than 1, got {value}",
    ),
    *refused(
        "optimizer",
        lambda v, o: v == "muon" and o.wants_adapters,
        "--optimizer: muon is for the matrices of blocks, which stay as they are beside adapters",
    ),
    *refused(
        "optimizer",
        lambda v, o: v == "muon" and o.learning_rate == 0,
        "--optimizer: muon takes the course of its rate from --learning-rate, which must be more "
        "than 0",
    ),
    *refused(
        "adam_epsilon",
        lambda v, o: v < _LEAST_EPSILON,
        "--adam-epsilon: must be greater than 0 (in F32, at least 1.2e-38), else the update of a "
        "weight without gradients is 0 / 0, got {value}",
    ),
    *idle(
        "final_lr_fraction",
        lambda v, o: o.lr_schedule == "wsd",
        "--final-lr-fraction has no effect with --lr-schedule wsd",
    ),
    *idle(
        "muon_lr muon_momentum muon_scale muon_coefficients cautious_decay",
        lambda v, o: o.optimizer != "muon",
        "{given} has no effect without --optimizer muon",
    ),
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
)
"""Rules that know nothing but the options."""
