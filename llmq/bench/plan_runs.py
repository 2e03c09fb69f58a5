"""The plans of the runs of a sweep, in a process of its own.

`python -m llmq.bench.plan_runs RESULT ALIVE` reads `runs` and `parent` as JSON from standard input,
and writes to the file RESULT `machine`, and `runs` in the same order: `status` ("fits", "does not
fit", "failed" where nothing can be planned), `message`, and of what was planned `device` and
`host`, bytes that are needed, `step_seconds` and `tokens_per_second`, and `on_gpu`: on the CPU the
plan only says how runs compare. It touches ALIVE after each.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from llmq.base.errors import LlmqError
from llmq.base.files import write_file
from llmq.bench.child import job_of_parent
from llmq.bench.measure import versions_of
from llmq.options.options_io import make_config
from llmq.plan.advice import shortages
from llmq.plan.checks import plan_unchecked
from llmq.plan.cost import step_time
from llmq.plan.memory import memory_limit, needed_bytes
from llmq.run.model_of_run import model_of_run
from llmq.runtime.machine import Machine, choose_machine

_machine = cache(choose_machine)  # what is free is asked once: all runs are compared with the same


def planned(options: dict[str, Any]) -> tuple[dict[str, Any], Machine]:
    """The record of one run's plan, and where it would run. Raises LlmqError."""
    config = make_config(options | {"steps": 1, "cooldown": 0})
    model, _ = model_of_run(config, weights=False)
    machine = _machine(config.device, config.gpus)
    planner, run = plan_unchecked(config.validate_with(model), model, machine)
    problems = shortages(run.plan, planner.spec, memory_limit(config, machine))
    seconds = step_time(run.plan, planner.card, network=planner.network).total
    found = {
        "status": "does not fit" if problems else "fits",
        "message": "; ".join(problems) or None,
        "device": needed_bytes(run.plan, planner.spec),
        "host": run.plan.host_bytes,
        "step_seconds": seconds,
        "tokens_per_second": run.plan.tokens / seconds,
        "on_gpu": machine.kind == "cuda",
    }
    return found, machine


def main() -> None:
    """The child: see the top of this file."""
    job = job_of_parent()
    runs: list[dict[str, Any]] = []
    where = None
    for options in job["runs"]:
        try:
            found, machine = planned(options)
            versions = versions_of(machine.kind)
            where = {"device": machine.spec.name, "gpu": None, "versions": versions}
        except LlmqError as error:
            found = {"status": "failed", "message": error.headline}
        runs.append(found)
        Path(sys.argv[2]).touch()
    write_file(Path(sys.argv[1]), json.dumps({"runs": runs, "machine": where}))


if __name__ == "__main__":
    main()
