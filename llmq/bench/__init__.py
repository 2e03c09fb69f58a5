"""Measurements: how fast configurations are, and whether options change any bit.

Imports everything below: base to train.
Start with `measure.py`, which times one run, and `bench.py`, which makes many.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `llmq bench` that are not of the runs.

    out: of the report, without a suffix. peers: JSON with `runs` of other programs and `floors`.
    steps: timed in each of the repeats. add: to what the report holds. plan_first: what does not
    fit is left out, and the fastest comes first. resume: what the report holds is not made again;
    retry: but what failed is. timeout: seconds of one run, 0 for none; None: by its prediction.
    overwrite: a report that is there, finished or not.
    """

    out: Path = Path("bench")
    peers: Path | None = None
    steps: int = 5
    repeats: int = 3
    add: bool = False
    plan_first: bool = False
    resume: bool = False
    retry: bool = False
    timeout: float | None = None
    overwrite: bool = False
