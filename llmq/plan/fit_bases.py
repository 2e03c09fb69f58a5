"""The search beside adapters: also for the format that the model is kept in."""

from __future__ import annotations

from llmq.options.rules import RULES
from llmq.plan.advice import NOTICEABLE, refusal
from llmq.plan.fit import SHOWN, Candidate, Fit
from llmq.runtime.device import HOST_SPEC


def fits_of(fit: Fit) -> list[Fit]:
    """The same search with each --base-dtype that the card computes fast with, the finest first.

    Only itself where nothing is kept in another format, or this was given.
    """
    if not fit.base.has_adapters or "base_dtype" in fit.fixed or fit.planner.spec == HOST_SPEC:
        return [fit]
    changes = [rule.changes(fit.base, fit.planner.card) for rule in RULES.savers("base")]
    tried = (fit.shrinker.allowed(fit.base, change) for change in changes)
    others = [config for config in tried if config is not None]
    return [fit, *(Fit(config, fit.planner, fit.limits, fit.fixed) for config in others)]


def search_bases(fit: Fit) -> tuple[Fit, list[Candidate]]:
    """Candidates that fit, the best first, at most SHOWN of them, and the search that found the
    best.

    A coarser format of the model comes before a finer one only if it is noticeably faster. Each
    other search gives one. Raises OutOfMemory if nothing fits.
    """
    fits = fits_of(fit)
    if len(fits) == 1:
        return fit, fit.search()
    found = [(each, each.found()) for each in fits if not each.is_hopeless()]
    found = [(each, candidates) for each, candidates in found if candidates]
    if not found:
        raise refusal(fits[-1].ladder()[0], fit.planner, fit.limits, fits[-1].fixed)

    def worth(place: int) -> float:
        coarseness = fits.index(found[place][0])
        return found[place][1][0].need.speed / (1 + NOTICEABLE) ** coarseness

    best, *others = sorted(range(len(found)), key=worth, reverse=True)
    ways = [found[place][1][0] for place in others]
    candidates = found[best][1][: SHOWN - len(ways)]
    return found[best][0], [candidates[0], *ways, *candidates[1:]]
