"""The share of a rank is the number of a step's micro-batches that the rank computes."""

import re
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Any

EQUAL, AUTO = "equal", "auto"
"""The words for --share: EQUAL gives each rank the same number of micro-batches, AUTO a number by
measured rates."""


def parse_share(value: Any) -> str:
    """Parse EQUAL, AUTO, or positive numbers for all GPUs, such as 3:2. Raises ValueError for any
    other text."""
    text = str(value).lower()
    numbers = re.fullmatch(r"\d+(\.\d+)?(:\d+(\.\d+)?)+", text)
    if text in (EQUAL, AUTO) or (numbers and min(map(float, text.split(":"))) > 0):
        return text
    raise ValueError(f"expected equal, auto or numbers above 0 such as 3:2, got {value!r}")


def apportion(total: int, rates: Sequence[float]) -> list[int]:
    """Divide `total` micro-batches, at least one for each rank, so that the slowest rank ends as
    early as possible. rates: the number of micro-batches that each rank computes in equal time.
    Each micro-batch goes to the rank that would finish it earliest; ties go to the lower rank."""
    shares = [1] * len(rates)
    ends = [(2 / rate, rank) for rank, rate in enumerate(rates)]
    heapify(ends)
    for _ in range(total - len(rates)):
        _, rank = ends[0]
        shares[rank] += 1
        heapreplace(ends, ((shares[rank] + 1) / rates[rank], rank))
    return shares


def shown(shares: Sequence[float]) -> str:
    """Return shares as --share spells them, such as 3:2."""
    return ":".join(f"{share:g}" for share in shares)
