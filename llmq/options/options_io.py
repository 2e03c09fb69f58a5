"""From an option file and the command line to a TrainConfig, and from a TrainConfig to the log."""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.options.foreign import answer
from llmq.options.loss_params import named_texts, named_values
from llmq.options.options import GROUPS, OPTIONS, TrainConfig
from llmq.options.removed import REMOVED, current_options
from llmq.options.rules import RULES
from llmq.options.sizes import SIZES

FIELDS = {flag: name for name, opt in OPTIONS.items() for flag in opt.flags}
"""Field names of options, by each of their flags."""
MOST_WRONG = 50  # most lines of an error
# Flags of `llmq train` that are no options of a run.
COMMAND_LINE_ONLY = {"auto", "config", "dry-run", "help", "reserve", "restarts", "save-config"}

# Rows of [Options] with another name than the flag: row, field of TrainConfig.
_RENAMED = {
    "lm-head-chunks": "lmhead_chunks",
    "cuda-graphs": "use_cuda_graphs",
    "use-write-combined": "write_combined",
    "final-lr": "final_lr_fraction",
    "micro-batch": "batch_size",
    "ckpt-every-n-steps": "ckpt_interval",
    "ckpt-keep": "ckpt_keep_n",
    "train-loader-seed": "train_seed",
    "eval-loader-seed": "eval_seed",
}
# First rows, in llm.q's order; the other rows follow in the order of --help.
_FIRST = (
    "name recompute-swiglu recompute-norm recompute-ffn recompute-qkv recompute-att "
    "recompute-block lm-head-chunks attn-bwd-chunks offload-master offload-quants offload-opt-m "
    "offload-opt-v use-zero-copy shard-weights shard-gradients persistent-quants cuda-graphs "
    "all-to-all-reduce memcpy-all-gather memcpy-send-recv use-write-combined matmul-dtype "
    "gradient-dtype model-dtype opt-m-dtype opt-v-dtype learning-rate warmup cooldown final-lr "
    "lr-schedule beta-1 beta-2 grad-clip weight-decay grad-accumulation micro-batch seq-len "
    "total-batch steps-per-epoch steps eval-every-n-steps eval-num-steps ckpt-every-n-steps "
    "ckpt-keep ckpt-major train-loader-seed eval-loader-seed arch vocab-size hidden-size ffn-size "
    "experts expert-size num-layers tied-word-emb num-heads num-kv-heads train-file eval-file "
    "checkpoint-dir out-dir log-file head-dim qk-norm logit-softcap max-positions rope-theta "
    "rope-scaling"
).split()
MODEL_ROWS = (
    "arch vocab-size hidden-size ffn-size experts expert-size num-layers tied-word-emb num-heads "
    "num-kv-heads head-dim max-positions rope-theta rope-scaling"
).split()
"""Rows of [Options] that describe the model."""


Layers = tuple[dict[str, Any], dict[str, Any]]
"""Values of a file and given values, both by field name; given values win."""


def make_config(given: Mapping[str, Any], file: Path | None = None) -> TrainConfig:
    """Return the normalized, validated options of a run: given values win over the file's values,
    and these over defaults. given: by flag name, or in mappings by group. file: YAML, JSON or TOML
    with the same keys; - and _ are equal. ConfigError for an unknown key, an invalid value, or a
    switch that is off although another option implies it."""
    return config_of(layers_of(given, file))


def layers_of(given: Mapping[str, Any], file: Path | None = None) -> Layers:
    """Read the file; return its values and the given values, both with arguments as in
    make_config."""
    return _of_file(file), _by_field(given, "")


def fields_of(layers: Layers) -> frozenset[str]:
    """Fields of TrainConfig that the user has set."""
    return frozenset().union(*layers)


def config_of(layers: Layers, inherited: Mapping[str, Any] | None = None) -> TrainConfig:
    """Make the config as make_config does. inherited: values by field name that replace
    defaults."""
    values = dict(inherited or {})
    for layer in layers:
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in layer:  # steps and epochs exclude each other; the later layer wins
                values.pop(other, None)
        values |= layer | _merged(values, layer)
    config = TrainConfig(**values).normalized().validate()
    for name, value in values.items():
        implying = RULES.implied_by(name, config) if value is False else None
        if implying is not None:
            raise ConfigError(
                f"--no-{OPTIONS[name].flags[0]}: {implying} implies {OPTIONS[name].flag}: leave "
                "out one of them"
            )
    return config


def _merged(values: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Named values (--loss-params, --lr-parts) by field: a layer's values win over those of lower
    layers. Another loss drops the lower layers' parameters."""
    found = {}
    for name in ("loss_params", "lr_parts"):
        below, given = (named_values(each.get(name, ())) for each in (values, layer))
        if name == "loss_params" and layer.get("loss", values.get("loss")) != values.get("loss"):
            below = {}
        if below or given or name in values:
            found[name] = named_texts(below | given)
    return found


def _by_field(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Converted values by field name, without None; where: prefix of messages. Removed options
    become current options, with a warning each. ConfigError lists all wrong keys, and all wrong
    values of known keys."""
    given: dict[str, Any] = {}
    wrong: list[str] = []
    for key, value, group in _flat(values):
        name, problem = _field_of(key, value, group)
        if name in given:
            problem = f"{key} is given twice, under two names"
        if problem is not None:
            wrong.append(problem)
        elif value is not None:
            given[name] = value
    if not REMOVED.keys().isdisjoint(given):
        given = current_options(given, where, every=True)
    for name, value in given.items():
        try:
            given[name] = OPTIONS[name].convert(value)
        except ConfigError as error:
            wrong.append(error.headline)
    _refuse(wrong, where)
    return given


def _refuse(wrong: Sequence[str], where: str) -> None:
    """Raise ConfigError if anything is wrong; several errors get a line each."""
    if len(wrong) == 1:
        raise ConfigError(f"{where}{wrong[0]}")
    if wrong:
        more = [f"  and {len(wrong) - MOST_WRONG} more"] if len(wrong) > MOST_WRONG else []
        lines = [f"  {line}" for line in wrong[:MOST_WRONG]]
        raise ConfigError(f"{where}{len(wrong)} options are wrong:", [*lines, *more])


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[Any, Any, str | None]]:
    """Yield key, value and group; group is None for keys outside a mapping such as `memory:
    {recompute-block: true}`."""
    for key, value in values.items():
        if key in GROUPS and isinstance(value, Mapping):
            yield from ((inner, of_option, key) for inner, of_option in value.items())
        else:
            yield key, value, None


def _field_of(key: Any, value: Any, group: str | None) -> tuple[str | None, str | None]:
    """Return the field of a key (also of a removed option) and None, or None and the problem with
    the key."""
    flag = str(key).replace("_", "-")
    name = FIELDS.get(flag, flag.replace("-", "_"))
    if (foreign := answer(str(key), value)) is not None and name not in REMOVED:
        return None, foreign
    if name in REMOVED:
        return name, None
    if flag in FIELDS:
        if group is None or name in {field.name for field in dataclasses.fields(GROUPS[group])}:
            return name, None
        home = next(g for g, c in GROUPS.items() if hasattr(c, name))
        return None, f"{group}: {key} is of the group {home}"
    if flag in COMMAND_LINE_ONLY:
        return None, f"{key} is for the command line of llmq train only"
    near = difflib.get_close_matches(flag, FIELDS, n=1)
    hint = f", did you mean {near[0]}?" if near else "; llmq train --help lists them"
    return None, f"unknown option {key}{hint}"


def _of_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    from llmq.options import option_file  # imported here, so that --help does not wait for YAML

    return _by_field(option_file.read_option_file(file), f"{file}: ")


def option_rows(
    config: TrainConfig,
    model: ModelConfig,
    *,
    world_size: int | None = None,
    steps_per_epoch: int | None = None,
    total_steps: int | None = None,
) -> list[tuple[str, bool | int | float | str]]:
    """Return name and value of every option, for [Options] and the log: llm.q's rows first, under
    its names. Rows total-batch and steps-per-epoch need their arguments; total_steps replaces
    --steps. None becomes 'none'."""
    names = [name for name in OPTIONS if name not in SIZES]  # rows of the model have the sizes
    shown = {OPTIONS[name].flags[0]: getattr(config, name) for name in names}
    for row, name in _RENAMED.items():
        shown[row] = shown.pop(OPTIONS[name].flags[0])
    shown = {row: _label(row, value) for row, value in shown.items()}
    if total_steps is not None:
        shown["steps"] = total_steps
    if world_size is not None:
        readers = world_size // config.context_parallel
        shown["total-batch"] = (
            config.batch_size * config.seq_len * config.grad_accumulation * readers
        )
    if steps_per_epoch is not None:
        shown["steps-per-epoch"] = steps_per_epoch
    shown |= _of_model(model)
    return [(row, shown.pop(row)) for row in _FIRST if row in shown] + list(shown.items())


def _of_model(model: ModelConfig) -> dict[str, bool | int | float | str]:
    scaling, experts_of = model.rope_scaling, model.experts
    experts = {}
    if experts_of is not None:
        experts = {
            "experts": f"{experts_of.active} of {experts_of.count}",
            "expert-size": model.expert_size,
        }
    return {
        "arch": model.arch.label,
        "vocab-size": model.vocab_size,
        "hidden-size": model.hidden_size,
        "ffn-size": model.intermediate_size,
        **experts,
        "num-layers": model.num_layers,
        "tied-word-emb": model.tied_embeddings,
        "num-heads": model.num_heads,
        "num-kv-heads": model.num_kv_heads,
        "head-dim": model.head_dim,
        "qk-norm": model.qk_norm,
        "logit-softcap": model.logit_softcap or "none",
        "max-positions": model.max_positions,
        "rope-theta": model.rope_theta if model.positions == "rope" else "none",
        "rope-scaling": "none" if scaling is None else json.dumps(scaling.write()),
    }


def _label(row: str, value: Any) -> bool | int | float | str:
    """The log's text of a value: number formats as llm.q spells them, paths as text."""
    from llmq.base.dtypes import parse_dtype  # imported here, because NumPy loads slowly

    if value is None:
        return "none"
    if row.endswith("-dtype"):
        return parse_dtype(value).label
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return value if isinstance(value, bool | int | float) else str(value)
