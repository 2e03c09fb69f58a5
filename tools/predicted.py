#!/usr/bin/env python3
"""The planner's speeds beside the measured ones: a Markdown table of every kept run.

    PYTHONPATH=. tools/predicted.py benchmarks/*.json > benchmarks/predicted.md

Reads the JSON reports of `llmq bench`; runs on cards that llmq/config/cards.py does not know are
left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llmq.config.cards import CARDS, Card, spec_of
from llmq.config.options_io import make_config
from llmq.config.presets import preset
from llmq.plan.cost import step_time
from llmq.plan.plan import fewest_attention_parts, make_plan

PLAIN = {"model", "batch-size", "grad-accumulation", "from-scratch", "device", "seq-len"}
PLAIN |= {"watchdog", "model-dtype", "opt-m-dtype", "opt-v-dtype"}


def predicted(card: Card, options: dict[str, Any], gpus: int) -> float:
    """Tokens per second."""
    config = make_config(options)
    planned_for = (preset(config.model), spec_of(card), "cudnn", gpus)
    plan = make_plan(fewest_attention_parts(config, *planned_for), *planned_for)
    return plan.tokens / step_time(plan, card).total


def row(card: Card, run: dict[str, Any]) -> str:
    """One line of the table."""
    options = run["options"]
    flags = " ".join(
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if name not in PLAIN
    )
    batch = f"{options['batch-size']} x {options['grad-accumulation']}"
    measured, guess = run["result"]["tokens_per_second"], predicted(card, options, run["gpus"])
    return (
        f"| {run['model']} | {batch} | {flags} | {measured:,.0f} | {guess:,.0f} | "
        f"{100 * (guess / measured - 1):+.1f} % |"
    )


def main(paths: list[str]) -> None:
    """Print the table."""
    print("`tools/predicted.py benchmarks/*.json`: tokens/s, as measured and as `llmq plan` says\n")
    print("| model | batch | flags | measured | predicted | difference |")
    print("| --- | --- | --- | --- | --- | --- |")
    for path in sorted(paths):
        report = json.loads(Path(path).read_text())
        card = CARDS.get((report.get("machine") or {}).get("device"))
        for run in report["runs"] if card else []:
            if run["status"] == "ok":
                print(row(card, run))


if __name__ == "__main__":
    main(sys.argv[1:])
