"""Try faults on llmq, and write a table of what was tried and what was bad.

    python -m tools.faults                                  # each machine for 60 s
    python -m tools.faults kills errors --seconds 600 --seed 7
    python -m tools.faults kills --seed 7 --only 41 --only 97    # bad ones again, with their ends
    python -m tools.faults --tries 20 --json faults.json

Needs the packages of the extra `test`. Exits 1 if anything was bad.
"""

from __future__ import annotations

import json
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
from tools.faults.table import merge, table

MACHINES: dict[str, type[Machine]] = {
    m.name: m for m in (Kills, WriteErrors, PowerLoss, Mutations, Options, Divergence)
}


def main(
    machines: Annotated[list[str] | None, typer.Argument(help="All if not given.")] = None,
    seconds: Annotated[float, typer.Option(help="For each machine.")] = 60.0,
    tries: Annotated[int | None, typer.Option(help="As many, however long it takes.")] = None,
    seed: Annotated[int, typer.Option(help="Another one tries others.")] = 0,
    first: Annotated[int, typer.Option(help="Number of the first fault.")] = 0,
    only: Annotated[list[int] | None, typer.Option(help="Number of a fault.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON; what is there is added to.")] = None,
    page: Annotated[Path | None, typer.Option(help="The table, of all that is in --out.")] = None,
) -> None:
    """Try faults."""
    warm_up()
    tallies = []
    for name in machines or MACHINES:
        machine = MACHINES[name]()
        tally = Tally(machine.title, seed)
        with scratch_folder() as folder:
            machine.prepare(folder, random.Random(f"{seed} {name}"))
            start = time.monotonic()
            for number, outcome in attempts(machine, seed, seconds, tries, only or [], first):
                tally.add(number, outcome)
                for category, text in outcome.problems:
                    print(f"BAD {name} {number}: {outcome.what}: {category}: {text}", flush=True)
                if only:
                    print(f"{number}: {outcome.what}: {outcome.problems or 'good'}")
            tally.seconds = time.monotonic() - start
        tallies.append(tally)
        if out is not None:
            merge(out, tally)
    print(table([json.loads(json.dumps(t.record())) for t in tallies]))
    if page is not None:
        page.write_text(
            Path(__file__).with_name("page.md").read_text() + table(json.loads(out.read_text()))
        )
    sys.exit(any(t.worst for t in tallies))


if __name__ == "__main__":
    typer.run(main)
