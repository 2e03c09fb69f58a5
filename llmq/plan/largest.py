"""The largest model that a machine trains: `llmq plan --largest`."""

import json as json_module
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError
from llmq.options.options import TrainConfig
from llmq.options.presets import PRESETS, released
from llmq.options.sizes import SIZES
from llmq.plan.fit import Fit, fits_of
from llmq.plan.memory import Limits, OutOfMemory
from llmq.plan.report import SearchResult, fit_record, fit_report
from llmq.plan.target import PlanTarget, target
from llmq.state.params import parameter_count

ALONE = 1024 * MIB  # of host memory, which a run has where a model is on its card alone
_TOYS = "tiny"  # with which names of presets begin that are for tests


def run_largest(
    config: TrainConfig,
    fixed: frozenset[str],
    gpu_memory: int | None = None,
    host_memory: int | None = None,
    card: str | None = None,
    reserve: int | None = None,
    *,
    card_file: Path | None = None,
    machines: int = 1,
    network: int | None = None,
    json: bool = False,
) -> TrainConfig:
    """`llmq plan --largest`: print which preset it is, and as `--fit` how it fits; returns that.
    fixed: options that were given. The rest as run_plan. Raises OutOfMemory if none fits, and
    ConfigError where options say which model it is."""
    _check_largest(fixed)
    given = (gpu_memory, host_memory, card, reserve)
    how = {"search": True, "machines": machines, "network": network, "card_file": card_file}
    for name, fit, where in _fits_by_size(
        config, lambda m: target(config, m, *given, **how), fixed
    ):
        try:
            found = SearchResult.of(fit, where)
        except OutOfMemory:  # it was not as quickly seen
            continue
        parameters = parameter_count(fit.planner.model)
        if json:
            record = {"model": name, "parameters": parameters} | fit_record(found, where)
            print(json_module.dumps(record, indent=2))
        else:
            print(f"The largest model that fits is {name}, with {parameters:,} parameters.\n")
            print("\n".join(fit_report(found, where)))
        return found.candidates[0].config
    raise OutOfMemory("no preset fits with these options", [])


def _check_largest(fields: Collection[str]) -> None:
    """ConfigError where options say already which model. fields: that were given."""
    for name in ("model", *SIZES):
        if name in fields:
            spelled = name.replace("_", "-")
            raise ConfigError(f"--largest: chooses the model, leave out --{spelled}")


def _fits_by_size(
    config: TrainConfig,
    target: Callable[[ModelConfig], PlanTarget],
    fixed: frozenset[str],
    presets: Iterable[str] | None = None,
) -> Iterator[tuple[str, Fit, PlanTarget]]:
    """Searches for presets that may fit, the one with most parameters first, with their names.
    target: the machine, for a model. presets: None: all. Without a limit of host memory all has to
    be on the card, but for ALONE. Presets that the options do not go with are left out."""
    for name in sorted(PRESETS if presets is None else presets, key=_parameters, reverse=True):
        model = PRESETS[name]
        if name.startswith(_TOYS):
            continue
        own = replace(config, model=name)
        if config.has_adapters:  # which need trained weights
            repository, model = released(name)
            own = replace(own, model=repository, download=True, from_scratch=False)
        try:
            own.validate_with(model)
        except ConfigError:
            continue
        where = target(model)
        if where.limits.device is None:
            raise ConfigError("--largest: of how much memory? Give --gpu-memory or --card")
        host = ALONE if where.limits.host is None else where.limits.host
        where = replace(where, limits=Limits(device=where.limits.device, host=host))
        fit = Fit(own, where.planner(model), where.limits, fixed)
        if any(each.can_fit() for each in reversed(fits_of(fit))):
            yield name, fit, where


def _parameters(name: str) -> int:
    return parameter_count(PRESETS[name])
