"""Functions that run once on every rank, in threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmq.runtime.workers import RankPool, Workers


def run_ranks(world_size: int, fn: Callable[[int, Workers], Any]) -> list[Any]:
    """fn(rank, workers) once on every rank of a pool of its own; the results by rank."""
    pool = RankPool(world_size)
    try:
        return pool.run("run", lambda rank: fn(rank, pool.workers))
    finally:
        pool.close()
