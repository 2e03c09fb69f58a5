#!/usr/bin/env python3
"""Write into each file of configs/ its predicted memory and speed, and into README.md the table of
these predictions.

    PYTHONPATH=. tools/plan_configs.py

The first comments of a file name its card ("# Card: 4090", as for `llmq plan --card`). The tool
replaces the block of comments between the two lines of dashes by the plan of the config on this
card, with the preset in place of the model from Hugging Face. README's table is made from the
files' blocks. Raises LlmqError for a config that does not fit on its card beside a desktop.
"""

from __future__ import annotations

import re
from pathlib import Path

from llmq.commands.common import load_run
from llmq.commands.rl import load_rl
from llmq.plan.advice import check_fits
from llmq.plan.cost import rollout_time, step_time
from llmq.plan.memory import DESKTOP_BYTES, disk_use, mib, needed_bytes
from llmq.plan.plan import plan_generation
from llmq.plan.target import MachineOptions, target

CONFIGS = Path(__file__).parents[1] / "configs"
README = CONFIGS.parent / "README.md"
ROWS = re.compile(r"(?<=\n\| card \| Qwen2.5-0.5B \|)(.*\n.*\n)(\|.*\n)+")
SIZES, MEMORIES = ("0.5b", "1.5b", "7b"), (8, 12, 16, 24)  # models and GB of README's table
BEGIN, END = "# --- written by tools/plan_configs.py", "# ---"
BLOCK = re.compile(rf"^{re.escape(BEGIN)}\n.*?^{END}\n", re.MULTILINE | re.DOTALL)


def predicted(path: Path) -> str:
    """The block of comments with the predictions for the config in a file."""
    text = path.read_text()
    words = re.search(r"^# Card: (.+)$", text, re.MULTILINE)[1]
    name = re.search(r"^model: (?:Qwen/)?(.+?)(?:-Instruct)?$", text, re.MULTILINE)[1]
    given = {"model": name, "from-scratch": True}
    load = load_rl if path.stem.startswith("rl-") else load_run
    config, model, *_ = load(given, path, plans=True)
    asked = MachineOptions(card=words, reserve=DESKTOP_BYTES)
    where = target(config.validate_with(model), model, asked, search=True)
    planner = where.planner(model)
    plan = planner.plan(config)
    check_fits(config, planner, plan, where.limits)
    time, disk = step_time(plan, where.card), disk_use(config, model, plan.placement)
    cards = "one" if where.world_size == 1 else f"{where.world_size} x"
    on_disk, _, rest = disk.facts()["On disk"].partition("; ")
    if config.samples:
        made = plan_generation(config, model, where.spec, where.backend, plan)
        seconds = rollout_time(plan, made, config, where.card)
        whole, sample = (round(n, -1) for n in (seconds.total, seconds.sample))
        speed = f"a step in about {whole:.0f} s at most, {sample:.0f} s of them to sample"
        speed += f" {made.texts(config.seq_len)} at a time"
    else:
        speed = f"{plan.tokens / time.total:,.0f} tokens/s{where.card.plus_minus(where.world_size)}"
        speed += f", a step of {plan.tokens:,} tokens in {time.total:.2g} s"
    lines = [
        f"On {cards} {where.card.name} ({where.card.size} GB):",
        f"  GPU memory:   {mib(needed_bytes(plan, where.spec))} each",
        f"  Host memory:  {mib(plan.host_bytes)} pinned, and some GiB for the program",
        f"  On disk:      {on_disk}",
        *([f"                {rest}"] if rest else []),
        f"  Speed:        {speed}",
    ]
    return "".join(f"{line}\n" for line in (BEGIN, *(f"# {line}" for line in lines), END))


def readme() -> str:
    """The text of README.md with a new table."""
    lines = []
    for memory in MEMORIES:
        cells, pinned, card = [], [], ""
        for size in SIZES:
            path = CONFIGS / f"finetune-qwen2.5-{size}-{memory}gb.yaml"
            if not path.exists():
                cells.append("does not fit")
                pinned.append("\N{EN DASH}")
                continue
            text = path.read_text()
            name = re.search(r"On one NVIDIA GeForce (.+) \(", text)[1]
            speed, error = re.search(r"Speed: +([\d,]+) tokens/s( ± \d+ %)?", text).groups()
            card = f"{memory} GB ({name}){error or ''}"
            cells.append(f"{int(speed.replace(',', '')) / 1000:.1f}k")
            mib = int(re.search(r"Host memory: +(\d+) MiB", text)[1])
            pinned.append(str(round(mib / 1024)))
        cells = [card, *cells, f"{', '.join(pinned)} GiB"]
        lines.append(f"| {' | '.join(cells)} |\n")
    return ROWS.sub(lambda found: found[1] + "".join(lines), README.read_text())


def main() -> None:
    """Rewrite the blocks of all files, and README's table."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        path.write_text(BLOCK.sub(lambda _, path=path: predicted(path), path.read_text()))
        print(path)
    README.write_text(readme())


if __name__ == "__main__":
    main()
