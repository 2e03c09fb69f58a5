"""Try faults on llmq, and write a table of what was tried and what was bad.

    python -m tools.faults                                  # each machine for 60 s
    python -m tools.faults kills errors --seconds 600 --seed 7
    python -m tools.faults kills --seed 7 --only 41 --only 97    # bad ones again, with their ends
    python -m tools.faults --full --report benchmarks/cpu/$(date +%F)/faults    # for hours

Needs the packages of the extra `test`. Exits 1 if anything was bad.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tools.faults.divergence import Divergence
from tools.faults.fuzz import Options
from tools.faults.kills import Kills, WriteErrors
from tools.faults.machine import Machine, Tally, attempts
from tools.faults.mutations import Mutations
from tools.faults.place import scratch_folder, warm_up
from tools.faults.power import PowerLoss
from tools.faults.table import add_to_report, commit_of_tree, table

MACHINES: dict[str, type[Machine]] = {
    m.name: m for m in (Kills, WriteErrors, PowerLoss, Mutations, Options, Divergence)
}


def main(
    machines: Annotated[list[str] | None, typer.Argument(help="All if not given.")] = None,
    seconds: Annotated[float, typer.Option(help="For each machine.")] = 60.0,
    tries: Annotated[int | None, typer.Option(help="As many, however long it takes.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As few as the tests try.")] = False,
    full: Annotated[bool, typer.Option("--full", help="As many as a report needs.")] = False,
    seed: Annotated[int, typer.Option(help="Another one tries others.")] = 0,
    only: Annotated[list[int] | None, typer.Option(help="Number of a fault; repeats.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="X: add to X.json, and write its table as X.md.")
    ] = None,
) -> None:
    """Try faults."""
    if unknown := [name for name in machines or () if name not in MACHINES]:
        raise typer.BadParameter(f"{unknown[0]}: expected one of {', '.join(MACHINES)}")
    commit = commit_of_tree()
    warm_up()
    records = []
    with scratch_folder() as folder:
        for name in machines or MACHINES:
            machine = MACHINES[name]()
            tally = Tally(machine.title, seed, commit)
            machine.prepare(folder, random.Random(f"{seed} {name}"))
            start = time.monotonic()
            count = machine.quick if quick else machine.full if full else tries
            for number, outcome in attempts(machine, seed, seconds, count, only or []):
                tally.add(number, outcome)
                for category, text in outcome.problems:
                    print(f"BAD {name} {number}: {outcome.what}: {category}: {text}", flush=True)
                if only and not outcome.problems:
                    print(f"good {name} {number}: {outcome.what}")
            tally.seconds = time.monotonic() - start
            records.append(tally.record())
            if report is not None:
                add_to_report(report, records[-1])
    print(table(records))
    sys.exit(any(record["worst"] for record in records))


if __name__ == "__main__":
    typer.run(main)
