"""Compare final losses of several ways to train, each at its own best rate.

    python tools/rate_sweep.py FILE --data DATA --steps N --out OUT [--share 0.75] [--minutes M]
    [options]

FILE is a sweep file of `llmq bench`. Runs that differ only in their learning rates are one way,
which has the name of its rows in FILE, if any. A trainer makes the runs one after the other, from
the same first weights on the same data. A run of the first way has N steps; runs of other ways have
the fraction `--share` of N, with a schedule of their own. The last lines of the table say whether
the other ways reach the first way's best loss in this fraction of the tokens. Options of `llmq
train` take precedence over FILE.

DATA has train*.bin and eval*.bin. OUT.md gets the table, OUT.json its numbers, OUT/ the runs' logs,
and OUT.png the curves of each way's best run, drawn by `llmq plot`. Runs that an existing OUT.json
has are not made again, so that an interrupted sweep continues. Runs are made in the order of FILE,
and no run begins after M minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import read_json, write_file
from llmq.bench.losses import LAST, best_of, loss_of, measure_losses
from llmq.bench.sweep_file import Row, read_runs
from llmq.commands.common import TrainCommand, train_options
from llmq.report.plot import run_plot

RATE = "learning-rate"
WARMUP = 20  # steps of a run for each step of its default warm-up
Records = list[dict[str, Any]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def ways_of(rows: list[Row]) -> dict[str, list[Row]]:
    """Group runs by way. A way's name lists the options in which the ways differ."""
    ways: dict[str, list[Row]] = {}
    keys = sorted({key for row in rows for key in row} - {RATE})
    differ = [key for key in keys if len({str(row.get(key)) for row in rows}) > 1]
    for row in rows:
        values = " ".join(str(row.get(key, "-")) for key in differ)
        ways.setdefault(row.get("name") or values or "all", []).append(row)
    return ways


def table(ways: dict[str, Records], share: float) -> list[str]:
    """Lines of the table: the losses of all runs, and whether each other way reaches the first
    way's best loss with `share` of its tokens."""
    head = f"| way | tokens | rate | evaluation loss | training loss, last {LAST} | seconds |"
    lines = [head, f"|{' --- |' * 6}"]
    best = {way: best_of(runs) for way, runs in ways.items()}
    for way, runs in ways.items():
        for run in runs:
            loss = f"**{loss_of(run)}**" if run is best[way] else loss_of(run)
            tokens, rate = f"{run['tokens'] / 1e6:.2f}M", f"{run['learning_rate']:g}"
            trained = "" if run["loss"] is None else f"{run['train_loss']:.4f}"
            columns = way, tokens, rate, loss, trained, f"{run['seconds']:.1f}"
            lines.append(f"| {' | '.join(columns)} |")
    lines.append("")
    first, *others = best
    for way in others:
        losses = best[way]["loss"], best[first]["loss"]
        if None not in losses:
            gap = losses[0] - losses[1]
            verb = "reaches" if gap <= 0 else "does not reach"
            told = f"{way} {verb} {first}'s best loss in {share:.0%} of its tokens"
            beside = best[way]["train_loss"] / best[first]["train_loss"] - 1
            lines.append(f"{told} ({gap:+.4f}, {gap / losses[1]:+.2%}; in training {beside:+.2%}).")
    several = {way: runs for way, runs in ways.items() if len(runs) > 1}
    ends = [way for way, runs in several.items() if best[way] in (runs[0], runs[-1])]
    return [*lines, *(f"The best rate of {way} is at an end of its rates." for way in ends)]


@app.command(cls=TrainCommand)
@train_options
def main(
    given: dict[str, Any],
    file: Annotated[Path, typer.Argument(help="The sweep file.")],
    data: Annotated[Path, typer.Option(help="Folder with train*.bin and eval*.bin.")],
    out: Annotated[Path, typer.Option(help="Results, without an ending.")],
    share: Annotated[float, typer.Option(help="Of the steps, of all ways but the first.")] = 1.0,
    minutes: Annotated[float, typer.Option(min=0, help="After which no run begins.")] = 0.0,
) -> None:
    """Compare final losses of several ways to train, each at its own best rate."""
    steps = int(given.pop("steps", -1))
    if steps < 1:
        raise ConfigError("--steps: how long is a run of the first way?")
    own = {"train-file": str(data / "train*.bin"), "eval-file": str(data / "eval*.bin")}
    ways = ways_of(read_runs(own | {"vocab-size": "auto"} | given, file, trains=True))
    rows: list[Row] = []
    for number, (way, of) in enumerate(ways.items()):
        length = round(steps * share) if number else steps
        ways[way] = [{"warmup": length // WARMUP} | row | {"steps": length} for row in of]
        rows += ways[way]
    report = out.with_suffix(".json")
    report.parent.mkdir(parents=True, exist_ok=True)
    runs = sorted(
        measure_losses(rows, report, seconds=60 * minutes, logs=out),
        key=lambda run: run["learning_rate"],
    )
    if not runs:
        raise ConfigError("--minutes: are too few to begin a run")
    found = {way: [run for run in runs if run["options"] in of] for way, of in ways.items()}
    found = {way: of for way, of in found.items() if of}  # ways without time for a run are left out
    lines = [
        f"# {' and '.join(found)}: {runs[0]['parameters'] / 1e6:.0f}M parameters, "
        f"{read_json(report)['device']}",
        "",
        f"`{' '.join(['tools/rate_sweep.py', *sys.argv[1:]])}`",
        "",
        *table(found, share),
    ]
    write_file(out.with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines[4:]))
    best = [out / best_of(of)["log"] for of in found.values()]
    run_plot(best, out.with_suffix(".png"), "tokens", overwrite=True)


def run() -> None:
    """Run the command; a user's error is one line."""
    try:
        app()
    except LlmqError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run()
