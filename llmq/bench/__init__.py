"""Measurements: how fast configurations are, and whether options change any bit.

Imports everything below: base to train.
Start with `measure.py`, which times one run, and `bench.py`, which makes many.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `llmq bench` that are not of the runs.

    out: of the report, without a suffix. steps: timed in each of the repeats. plan_first: leave out
    runs that do not fit, the fastest first. resume: runs of the report are not made again; retry:
    but failed ones. timeout: seconds of one run, 0: none; None: by its prediction. overwrite: a
    report that is there.
    """

    out: Path = Path("bench")
    steps: int = 5
    repeats: int = 3
    plan_first: bool = False
    resume: bool = False
    retry: bool = False
    timeout: float | None = None
    overwrite: bool = False
