"""Estimates that all planners of this process share: searches take most of their time."""

from __future__ import annotations

from typing import Any

import pytest

from llmq.plan.estimate import Planner

_KNOWN: dict[tuple, tuple[dict, dict]] = {}


@pytest.fixture
def shared_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a planner has found out, each of the same model and machine knows."""
    real = Planner.__init__

    def init(self: Planner, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        of = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        shared = _KNOWN.setdefault(tuple(of.items()), (self._estimates, self._known))
        self._estimates, self._known = shared

    monkeypatch.setattr(Planner, "__init__", init)
