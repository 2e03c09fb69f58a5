#!/usr/bin/env python3
"""Writes into each file of configs/ what it needs and how fast it is predicted to be.

    PYTHONPATH=. tools/plan_configs.py

A file says in its head which card it is for ("# Card: 4090", as for `llmq plan --card`). The block
of comments between the two lines of dashes is replaced by what `llmq plan` says of that card, with
the preset in place of the model from Hugging Face. LlmqError where a file does not fit on its card
beside a desktop.
"""

from __future__ import annotations

import re
from pathlib import Path

from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.advice import check_fits, mib
from llmq.plan.cost import step_time
from llmq.plan.disk import disk_use
from llmq.plan.memory import DESKTOP_BYTES, needed_bytes
from llmq.plan.target import target

CONFIGS = Path(__file__).parents[1] / "configs"
BEGIN, END = "# --- written by tools/plan_configs.py", "# ---"
BLOCK = re.compile(rf"^{re.escape(BEGIN)}\n.*?^{END}\n", re.MULTILINE | re.DOTALL)


def predicted(path: Path) -> str:
    """The block of comments of a file."""
    text = path.read_text()
    words = re.search(r"^# Card: (.+)$", text, re.MULTILINE)[1]
    name = re.search(r"^model: (?:Qwen/)?(.+)$", text, re.MULTILINE)[1]
    config, model = make_config({"model": name, "from-scratch": True}, path), preset(name)
    where = target(
        config.validate_with(model), model, None, None, words, DESKTOP_BYTES, search=True
    )
    planner = where.planner(model)
    plan = planner.plan(config)
    check_fits(config, planner, plan, where.limits)
    time, disk = step_time(plan, where.card), disk_use(config, model, plan.placement)
    cards = "one" if where.world_size == 1 else f"{where.world_size} x"
    speed = f"{plan.tokens / time.total:,.0f} tokens/s, a step of {plan.tokens:,} tokens"
    on_disk, _, rest = disk.lines()[1].partition(":")[2].strip().partition("; ")
    lines = [
        f"On {cards} {where.card.name} ({where.card.size} GB):",
        f"  GPU memory:   {mib(needed_bytes(plan, where.spec))} each",
        f"  Host memory:  {mib(plan.host_bytes)} pinned, and some GiB for the program",
        f"  On disk:      {on_disk}",
        *([f"                {rest}"] if rest else []),
        f"  Speed:        {speed} in {time.total:.2g} s",
    ]
    return "".join(f"{line}\n" for line in (BEGIN, *(f"# {line}" for line in lines), END))


def main() -> None:
    """Rewrite the blocks of all files."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        path.write_text(BLOCK.sub(lambda _, path=path: predicted(path), path.read_text()))
        print(path)


if __name__ == "__main__":
    main()
