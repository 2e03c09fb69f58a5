"""Shares of a step: how many of its micro-batches each rank computes."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

EQUAL = "equal"


def apportion(total: int, rates: Sequence[float]) -> list[int]:
    """Divide `total` micro-batches, at least one for each rank, so that the rank that needs longest
    needs least. rates: micro-batches that ranks compute in the same time. The next one goes to the
    rank that would be done with it first; among several to the first."""
    shares = [1] * len(rates)
    ends = [(2 / rate, rank) for rank, rate in enumerate(rates)]
    heapify(ends)
    for _ in range(total - len(rates)):
        _, rank = ends[0]
        shares[rank] += 1
        heapreplace(ends, ((shares[rank] + 1) / rates[rank], rank))
    return shares


def shown(shares: Sequence[float]) -> str:
    """Shares as --share spells them, such as 3:2."""
    return ":".join(f"{share:g}" for share in shares)
