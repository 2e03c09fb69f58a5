"""The runs of a sweep, read from a file of `llmq bench` and from the command line."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.options.option_file import read_option_file
from llmq.options.option_types import AUTO
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.options_io import FIELDS, make_config

MOST_RUNS = 100_000  # most runs in the product of all lists, beyond which a list is a mistake

Row = dict[str, Any]
"""The options of a run, by flag name without leading dashes."""

_FIRST_FLAG = {flag: opt.flags[0] for opt in OPTIONS.values() for flag in opt.flags}
_DATA = "train_file eval_file train_seed eval_seed steps epochs eval_every_n_steps "
_DATA += "eval_num_steps document_separator data_order"
# Options without effect on a benchmark: training data, outputs and when these are written, tasks
# during training.
_WITHOUT_EFFECT = {
    opt.flags[0]
    for name, opt in OPTIONS.items()
    if opt.group in {OPTIONS[n].group for n in ("log_file", "eval_task", "guard")}
    or name in _DATA.split()
}


def read_runs(given: Mapping[str, Any], file: Path | None, *, trains: bool = False) -> list[Row]:
    """Return the options of every distinct run.

    given: options of the command line, which override the file. file: YAML, TOML or JSON with
    options of all runs, and under `runs` a list of mappings, each with options of its own runs.
    Every combination of listed values is a run. trains: True if runs train on data; False if tokens
    are random and options of data are refused. Raises ConfigError for malformed or refused options.
    """
    shared = {} if file is None else read_option_file(file)
    runs = shared.pop("runs", [{}])
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise ConfigError(f"--config: {file}: runs must be a list of mappings of options")
    of_all, expanded = _by_flag(shared), []
    for run in runs:
        expanded += _product({"from-scratch": True} | of_all | _by_flag(run) | dict(given))
    if not expanded:
        raise ConfigError(f"--config: {file}: it has an empty list, so there is nothing to run")
    for options in expanded:
        _check(options, several=len(expanded) > 1, trains=trains)
    unique: dict[Hashable, Row] = {}
    for options in expanded:
        unique.setdefault(identity(options), options)
    return list(unique.values())


def one_run(given: Mapping[str, Any], file: Path | None) -> TrainConfig:
    """Return the config of the only run that the options stand for. Raises ConfigError for several
    runs."""
    runs = read_runs(given, file)
    if len(runs) > 1:
        raise ConfigError(f"--save-config: holds the options of one run, but these are {len(runs)}")
    return make_config(runs[0])


def identity(options: Row) -> Hashable:
    """Return a hashable that is equal for runs that do the same, however the options are
    spelled."""
    return _identity(json.dumps(options, sort_keys=True, default=str))


@cache
def _identity(text: str) -> Hashable:
    """Return the identity of the options that `text` holds as JSON. The cache helps a long sweep,
    which asks for each identity after every run."""
    try:  # log_file, named by time, and watchdog change no run
        return replace(make_config(json.loads(text)), log_file=None, watchdog=0)
    except ConfigError:  # a report of another version may have other options
        return text


def _product(options: Mapping[str, Any]) -> list[Row]:
    """Return all combinations of the values of lists. Raises ConfigError for more than
    MOST_RUNS."""
    choices = [values if isinstance(values, list) else [values] for values in options.values()]
    if (count := math.prod(map(len, choices))) > MOST_RUNS:
        raise ConfigError(f"--config: its lists stand for {count} runs, more than {MOST_RUNS}")
    return [dict(zip(options, chosen, strict=True)) for chosen in itertools.product(*choices)]


def value_of(options: Row, name: str) -> Any:
    """Return the value of an option in a run; the default if the option is not given."""
    name = _FIRST_FLAG[name]
    given, field = options.get(name), FIELDS[name]
    found = getattr(_defaults(), field) if given is None else OPTIONS[field].convert(given)
    return str(found) if isinstance(found, Path) else found


@cache
def _defaults() -> TrainConfig:
    return TrainConfig()


def _check(options: Row, *, several: bool, trains: bool) -> None:
    """Raise ConfigError for a run that cannot be made, before any run starts."""
    for key in () if trains else options:
        if key in _WITHOUT_EFFECT:
            raise ConfigError(f"--{key}: has no effect on a benchmark, leave it out")
    if options.get("from-scratch"):
        _check_random(options)
    try:
        config = make_config(options)
    except ConfigError as error:
        if not several:
            raise
        raise ConfigError(f"{error} (run {_spelled(options)})") from None
    if config.vocab_size == AUTO and not trains:
        raise ConfigError("--vocab-size: auto needs token files, and tokens are random here")


def _check_random(options: Row) -> None:
    """Raise ConfigError for adapters that need trained weights."""
    why = "a benchmark has random weights"
    if options.get("adapter") is not None:
        raise ConfigError(
            f"--adapter: {why}: give the rank of the adapters as --lora-rank, and their matrices "
            "as --lora-targets"
        )


def _spelled(options: Row) -> str:
    return " ".join(flag_of(key, value) for key, value in options.items() if key != "from-scratch")


def flag_of(key: str, value: Any) -> str:
    """Return an option as command-line text."""
    if isinstance(value, bool):
        return f"--{key}" if value else f"--no-{key}"
    return f"--{key}={value}"


def _by_flag(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by the first flag of each option; make_config refuses unknown options.
    Raises ConfigError if an option is given under two names."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        flag = str(key).replace("_", "-")
        flag = _FIRST_FLAG.get(flag, flag)
        if flag in found:
            raise ConfigError(f"--config: {flag} is given twice, under two names")
        found[flag] = value
    return found
