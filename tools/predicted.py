#!/usr/bin/env python3
"""The planner's speeds beside the measured ones: a Markdown table of every kept run.

    PYTHONPATH=. tools/predicted.py benchmarks/*/*/*.json > benchmarks/predicted.md
    PYTHONPATH=. tools/predicted.py --card-file rig.json benchmarks/*/*/*.json

Reads the JSON reports of `llmq bench`; runs on cards that llmq/options/cards.py does not know, and
runs with --share are left out. With a card file (rig.json of `llmq rig`) only runs on its card, and
on as many GPUs as it has or fewer, are shown, predicted by what was measured there, and again by
the data sheet. Two more columns are shares of the kernels' predicted time: of kernels whose kind is
in the card file, and of kernels whose kind and size are. The time of other kernels follows from
similar kernels, or from the data sheet. --several shows only runs on more than one GPU, also on
more GPUs than the card file has. --since leaves out runs before a date."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.options.cards import CARDS, Card, card_from, spec_of
from llmq.options.options_io import make_config
from llmq.plan.checks import installed_attention
from llmq.plan.cost import Rates, step_time
from llmq.plan.estimate import Planner
from llmq.plan.plan import Plan
from llmq.run.model_of_run import model_of_run
from llmq.runtime.plan_device import Work

PLAIN = {"model", "batch-size", "grad-accumulation", "from-scratch", "device", "seq-len"}
PLAIN |= {"watchdog", "model-dtype", "opt-m-dtype", "opt-v-dtype"}


def plan_of(card: Card, options: dict[str, Any], gpus: int) -> Plan:
    """The plan of a run on `gpus` of these cards."""
    config = make_config(options)
    model, spec = model_of_run(config)[0], spec_of(card)
    planner = Planner(model, spec, installed_attention(config, model, spec), card, gpus)
    return planner.plan(planner.with_fewest_parts(config))


def date_of(report: dict[str, Any], run: dict[str, Any]) -> str:
    """The UTC date of a run; "" if unknown. A report of a single `llmq bench` may have one date for
    all runs."""
    made = report["invocations"][run["invocation"]] if "invocation" in run else report
    return made.get("date", "")


def measured_shares(plan: Plan, card: Card) -> tuple[float, float]:
    """Shares of the predicted time of the main stream's kernels, 0 to 1: of kernels whose kind is
    in the card file, and of kernels whose kind and size are."""
    known = {
        name: {tuple(sizes) for sizes, _ in points}
        for name, points in card.measured.launches.items()
    }
    rates, total, kinds, same = Rates(card, nccl=plan.nccl), 0.0, 0.0, 0.0
    for trace, count in [*plan.micro_steps, (plan.update, 1)]:
        for work in trace:
            if isinstance(work, Work) and work.stream == "main":
                seconds = count * rates.compute(work)
                total += seconds
                kinds += seconds * (work.kind.name in known)
                same += seconds * (work.kind.sizes in known.get(work.kind.name, ()))
    return kinds / total, same / total


def row(cards: list[Card], run: dict[str, Any]) -> tuple[str, float]:
    """One line of the table, and the difference in percent between the first card's prediction and
    the measurement. cards: the card by measurements and by data sheet, or only by data sheet."""
    options = run["options"]
    flags = " ".join(
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if name not in PLAIN
    )
    batch = f"{options['batch-size']} x {options['grad-accumulation']}"
    measured, plan = run["result"]["tokens_per_second"], plan_of(cards[0], options, run["gpus"])
    cells = [run["model"], batch, flags, f"{measured:,.0f}"]
    differences = []
    for card in cards:
        guess = plan.tokens / step_time(plan, card).total
        differences.append(100 * (guess / measured - 1))
        cells += [f"{guess:,.0f}", f"{differences[-1]:+.1f} %"]
    if cards[0].measured is not None:
        cells += [f"{100 * share:.0f} %" for share in measured_shares(plan, cards[0])]
    return f"| {' | '.join(cells)} |", differences[0]


def main(
    paths: Annotated[list[Path], typer.Argument(help="Reports of llmq bench, JSON.")],
    card_file: Annotated[Path | None, typer.Option(help="Report of llmq rig, rig.json.")] = None,
    since: Annotated[str, typer.Option(help="YYYY-MM-DD: only runs from that day on.")] = "",
    *,
    several: Annotated[bool, typer.Option("--several", help="Only runs on several GPUs.")] = False,
) -> None:
    """Print the table."""
    rig = None if card_file is None else card_from(card_file)
    given = "--several " * several + (f"--since {since} " if since else "")
    command = f"tools/predicted.py {given}benchmarks/*/*/*.json"
    head = ["model", "batch", "flags", "measured", "predicted", "difference"]
    if rig is not None:
        names = " ".join(map(str, paths))
        command = f"tools/predicted.py --card-file {card_file} {given}{names}"
        head += ["by data sheet", "difference", "kind measured", "in this size"]
    print(f"`{command}`: tokens/s, as measured and as `llmq plan` says\n")
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    differences = []
    for path in sorted(paths):
        report = json.loads(path.read_text())
        card = CARDS.get((report.get("machine") or {}).get("device"))
        for run in report["runs"] if card else []:
            cards = [card]
            if rig is not None:
                most = math.inf if several else rig.measured.gpus
                if card.name != CARDS.get(rig.name, rig).name or run["gpus"] > most:
                    continue
                cards = [rig, card]
            counts = run["gpus"] > several and date_of(report, run) >= since
            counts = counts and "share" not in run["options"]
            if run["status"] == "ok" and counts:
                line, difference = row(cards, run)
                differences.append(difference)
                print(line)
    if rig is not None and differences:
        most, within = max(map(abs, differences)), sum(abs(d) <= 5 for d in differences)
        print(
            f"\n{rig.source}: at most {most:.1f} % off, {within} of {len(differences)} within 5 %"
        )


if __name__ == "__main__":
    typer.run(main)
