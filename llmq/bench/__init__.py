"""Measurements: the speed of configurations, and whether memory options change any bit.

Imports everything below: base to train. Start with `measure.py`, which times one run, and
`bench.py`, which makes many.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `llmq bench` itself; the options of its runs are separate.

    out: path of the report without suffix. steps: timed steps in each repeat. plan_first: leave out
    runs that do not fit, and make the fastest first. resume: keep the report's runs; retry: but
    repeat the failed ones. timeout: seconds of one run; 0: no limit; None: a limit from the
    prediction. overwrite: replace an existing report.
    """

    out: Path = Path("bench")
    steps: int = 5
    repeats: int = 3
    plan_first: bool = False
    resume: bool = False
    retry: bool = False
    timeout: float | None = None
    overwrite: bool = False
