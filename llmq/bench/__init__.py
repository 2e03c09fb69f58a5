"""Measurements of the speed of configurations, and checks that memory options change no bit.

This package may import packages of lower layers, from base to run. Begin to read with `measure.py`,
which times a run, and `bench.py`, which makes many runs.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `llmq bench` itself; the options of its runs are separate.

    out: path of the report without suffix. steps: timed steps in each repeat. plan_first: True to
    leave out runs that do not fit, and make the fastest runs first. resume: True to keep the
    report's runs. retry: True to repeat failed runs, with `resume`. timeout: seconds of a run; 0:
    no limit; None: a limit from the prediction. overwrite: True to replace an existing report.
    """

    out: Path = Path("bench")
    steps: int = 5
    repeats: int = 3
    plan_first: bool = False
    resume: bool = False
    retry: bool = False
    timeout: float | None = None
    overwrite: bool = False
