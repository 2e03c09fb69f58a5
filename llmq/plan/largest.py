"""The largest model that a machine trains: `llmq plan --largest`."""

import json as json_module
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from llmq.base.dtypes import MIB
from llmq.base.errors import ConfigError
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.presets import PRESETS, released
from llmq.options.sizes import SIZES
from llmq.plan.fit import Fit, fits_of
from llmq.plan.memory import Limits, OutOfMemory
from llmq.plan.report import SearchResult, fit_record, fit_report
from llmq.plan.target import MachineOptions, PlanTarget, target
from llmq.state.params import parameter_count

ALONE = 1024 * MIB  # of host memory, which a run has where a model is on its card alone
NEWS_SECONDS = 5.0  # between lines about where the search is
_TOYS = "tiny"  # with which names of presets begin that are for tests


def run_largest(
    config: TrainConfig, fixed: frozenset[str], asked: MachineOptions, *, json: bool = False
) -> TrainConfig:
    """`llmq plan --largest`: print which preset it is, and as `--fit` how it fits; returns that.
    fixed: options that were given. Raises OutOfMemory if none fits, and ConfigError where options
    say which model it is."""
    for name in ("model", *SIZES):
        if name in fixed:
            raise ConfigError(f"--largest: chooses the model, leave out {OPTIONS[name].flag}")
    for name, fit, where in _fits_by_size(config, asked, fixed):
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


def _fits_by_size(
    config: TrainConfig,
    asked: MachineOptions,
    fixed: frozenset[str],
    presets: Iterable[str] | None = None,
) -> Iterator[tuple[str, Fit, PlanTarget]]:
    """Searches for presets that may fit, the one with most parameters first, with their names.
    presets: None: all. Without a limit of host memory all has to be on the card, but for ALONE.
    Presets that the options do not go with are left out."""
    real = [name for name in presets or PRESETS if not name.startswith(_TOYS)]
    told = time.monotonic()
    for name in sorted(real, key=lambda name: parameter_count(PRESETS[name]), reverse=True):
        if time.monotonic() - told >= NEWS_SECONDS:
            print(f"Searching, now {name} …", file=sys.stderr, flush=True)
            told = time.monotonic()
        own, model = replace(config, model=name), PRESETS[name]
        if config.has_adapters:  # which need trained weights
            repository, model = released(name)
            own = replace(own, model=repository, download=True, from_scratch=False)
        try:
            own.validate_with(model)
        except ConfigError:
            continue
        where = target(config, model, asked, search=True)
        if where.limits.device is None:
            raise ConfigError("--largest: of how much memory? Give --gpu-memory or --card")
        host = ALONE if where.limits.host is None else where.limits.host
        where = replace(where, limits=Limits(device=where.limits.device, host=host))
        fit = Fit(own, where.planner(model), where.limits, fixed)
        if any(each.can_fit() for each in reversed(fits_of(fit))):
            yield name, fit, where
