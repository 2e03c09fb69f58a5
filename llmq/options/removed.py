"""Removed options of earlier versions: the option or constant that replaces each.

Command lines, arguments, option files and checkpoints with a removed option still work, with a
warning, unless the value gave other numbers than the constant.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llmq.base.errors import ConfigError, warn
from llmq.options.loss_params import LOSS_PARAMS, named_texts

Values = Mapping[str, Any]
"""Values of options by field name."""


class Removed(NamedTuple):
    """A removed option.

    now: sentence after "--flag: ". value: the constant that stands for the option, if `numbers` is
    True: other values then computed other numbers. becomes: function from the old value and all old
    values to the same values of current options; None if no option corresponds. when: function from
    all old values to True if the option had an effect beside these. switch: True if the flag had no
    value.
    """

    now: str
    value: Any = None
    numbers: bool = False
    becomes: Callable[[Any, Values], dict[str, Any] | None] | None = None
    when: Callable[[Values], bool] = lambda values: True
    switch: bool = False


def _loss_param(name: str, example: Any, switch: bool = False) -> Removed:
    """A removed option that --loss-params replaces. A loss without the parameter ignored the
    option. If `values` name no loss, the loss may have the parameter."""

    def becomes(value: Any, values: Values) -> dict[str, Any]:
        known = "loss" not in values or name in LOSS_PARAMS.get(values["loss"], {})
        return {"loss_params": named_texts({name: value})} if known else {}

    return Removed(f"use --loss-params {name}={example}", becomes=becomes, switch=switch)


def _rows(value: Any, values: Values) -> dict[str, Any] | None:
    """Options for --muon-normalize-rows: --optimizer normuon decays by 0.95 only."""
    if not value or values.get("optimizer") != "muon":
        return {}
    return {"optimizer": "normuon"} if value == 0.95 else None


def _of_muon(now: str, value: Any, switch: bool = False) -> Removed:
    def when(values: Values) -> bool:
        return values.get("optimizer") == "muon"

    return Removed(now, value, numbers=True, when=when, switch=switch)


def _rate_of(part: str) -> Removed:
    def becomes(value: Any, values: Values) -> dict[str, Any]:
        return {"lr_parts": named_texts({part: value})}

    return Removed(f"use --lr-parts {part}=1e-4", becomes=becomes)


def _head(value: Any, values: Values) -> dict[str, Any]:
    classes = value == "score" and values.get("loss") != "reward"
    return {"num_labels": 2} if classes and values.get("num_labels") is None else {}


def _split(value: Any, values: Values) -> dict[str, Any]:
    """--eval-file with the share of --eval-fraction; --train-file alone implies split."""
    file = values.get("eval_file") or ("split" if values.get("train_file") else None)
    files = [file] if isinstance(file, str) else list(file or ())
    files = [f"split:{value}" if each == "split" else each for each in files]
    return {"eval_file": files if len(files) > 1 else files[0]} if files else {}


REMOVED: dict[str, Removed] = {
    "token_weights": Removed(
        "weights in token files always count with --loss ce: `llmq tokenize` without --weights",
        becomes=lambda value, values: {},  # False also stands for files without weights
        switch=True,
    ),
    "attention_dtype": Removed("attention multiplies in the model's format", numbers=True),
    "lora_init": Removed("adapters begin with B at zero, and change nothing at first", "zero"),
    "head": Removed("use --num-labels for a score head of classes", becomes=_head),
    "qk_norm": Removed(
        "name a --model with these norms, such as qwen3-0.6b", numbers=True, switch=True
    ),
    "lr_embedding": _rate_of("embedding"),
    "lr_head": _rate_of("head"),
    "lr_vectors": _rate_of("vectors"),
    "eval_fraction": Removed("use --eval-file split:0.02", becomes=_split),
    "guard_recovery": Removed("the rate recovers over 100 steps after each rollback", 100),
    "task_limit": Removed("give a file of fewer records, as by `head -n 500`"),
    "sample_every": Removed("samples are made when tasks are evaluated, see --task-every", -1),
    "sample_tokens": Removed("samples have at most 64 tokens, `llmq sample` makes longer ones", 64),
    "measure_scaling": Removed(
        "`llmq bench` compares numbers of GPUs, with gpus: [1, 2]", False, switch=True
    ),
    "logit_softcap": Removed(
        "set final_logit_softcapping in the config.json that --model names", numbers=True
    ),
    "offload_ema": Removed(
        "--offload-master keeps the average in host memory, too", False, switch=True
    ),
    "muon_momentum": _of_muon("Muon's momentum decays by 0.95", 0.95),
    "muon_scale": _of_muon(
        "changes are as large as AdamW's (match-rms), give another rate by --muon-lr", "match-rms"
    ),
    "muon_coefficients": _of_muon("Muon takes Keller Jordan's coefficients", "jordan"),
    "muon_normalize_rows": Removed("use --optimizer normuon", numbers=True, becomes=_rows),
    "cautious_decay": _of_muon(
        "weight decay is that of --weight-decay for all weights", False, switch=True
    ),
    "pref_beta": _loss_param("beta", 0.1),
    "pref_gamma": _loss_param("gamma", 0.5),
    "pref_smoothing": _loss_param("smoothing", 0.1),
    "pref_normalize": _loss_param("normalize", "true", switch=True),
    "pref_sft": _loss_param("sft", 0.5),
    "kd_top_k": _loss_param("top-k", 64),
    "kd_mixture": _loss_param("mixture", 0.5),
    "kd_temperature": _loss_param("temperature", 2),
    "kd_divergence": _loss_param("divergence", "reverse"),
    "kto_desirable": _loss_param("desirable", 1),
    "kto_undesirable": _loss_param("undesirable", 1.5),
}
"""Removed options by field name."""


def current_options(
    values: Values, where: str, *, every: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Return an earlier version's values by current field names; warn of each removed option whose
    value differs from the constant.

    where: the source, such as "checkpoint 'ckpt/x/step_1': ". every: warn of all removed options;
    quiet: warn of none. ConfigError for a value that computed other numbers.
    """
    found = {name: value for name, value in values.items() if name not in REMOVED}
    for name in (name for name in values if name in REMOVED):
        old, value = REMOVED[name], _typed(values[name])
        made = None if old.becomes is None or value is None else old.becomes(value, values)
        for today, new in (made or {}).items():
            found[today] = (*found.get(today, ()), *new) if isinstance(new, tuple) else new
        line = f"{where}--{flag_of(name)}={value} is no option any more: "
        line += f"taken as {_flags(made)}" if made else old.now
        changed = made is None and value not in (None, old.value) and old.when(values)
        if changed and old.numbers:
            raise ConfigError(f"{line}; only an earlier version computes these numbers")
        if (changed or every) and not quiet:
            warn(line)
    return found


def _typed(value: Any) -> Any:
    """The value of a removed option; text of a command line becomes a number or boolean."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(value.lower(), value)


def flag_of(name: str) -> str:
    """The flag of a field name, without leading dashes."""
    return name.replace("_", "-")


def _flags(values: Values) -> str:
    """Options as on a command line."""
    each = (
        (name, new if isinstance(new, tuple | list) else (new,)) for name, new in values.items()
    )
    return " ".join(f"--{flag_of(name)} {' '.join(str(one) for one in new)}" for name, new in each)
