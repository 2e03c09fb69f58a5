#!/usr/bin/env python3
"""Write the predictions for several machines into docs/multi-machine.md.

    PYTHONPATH=. tools/plan_machines.py

Each number is a result of `llmq plan --card h100 --gpus 8 --machines N --network SIZE --shard-over
…` with the options of a model. The page holds these options and the table between two comments.
"""

from __future__ import annotations

import re
import textwrap
from itertools import product
from pathlib import Path

from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.cost import exposed_seconds, step_time
from llmq.plan.memory import needed_bytes
from llmq.plan.target import MachineOptions, target

PAGE = Path(__file__).parents[1] / "docs" / "multi-machine.md"
BEGIN, END = "<!-- written by tools/plan_machines.py -->", "<!-- until here -->"
BLOCK = re.compile(rf"^{re.escape(BEGIN)}\n.*?^{re.escape(END)}\n", re.MULTILINE | re.DOTALL)

CARD, PER_MACHINE = "h100", 8
MACHINES = (1, 8, 32, 128)
NETWORKS = (25, 400)  # GB/s
INDENTED = {"initial_indent": " " * 4, "subsequent_indent": " " * 10, "break_on_hyphens": False}
COMMON = "--from-scratch --matmul-dtype e4m3 --seq-len 4096 --grad-accumulation 4"
MODELS = {
    "7B": "--model Qwen2.5-7B --batch-size 2 --zero-level 2 --recompute-block",
    "32B": "--model Qwen2.5-32B --batch-size 1 --zero-level 3 --recompute-block "
    "--opt-m-dtype e4m3 --opt-v-dtype bf16",
}


def options(text: str) -> dict[str, str | bool]:
    """Values by flag."""
    found = re.findall(r"--(\S+)(?: ([^-]\S*))?", text)
    return {flag: value or True for flag, value in found} | {"gpus": PER_MACHINE}


def cells(model: str, machines: int, over: str) -> list[str]:
    """Cells of a row: memory of a GPU, then speed and exposed communication for each network."""
    config = make_config(options(f"{MODELS[model]} {COMMON}") | {"shard_over": over})
    sizes, found = preset(config.model), []
    for rate in NETWORKS:
        network = rate * 10**9 if machines > 1 else None
        asked = MachineOptions(card=CARD, machines=machines, network=network)
        where = target(config, sizes, asked, search=False)
        planner = where.planner(sizes)
        plan = planner.plan(planner.with_fewest_parts(config))
        speed = (plan, where.card, 1.0, where.network)
        seconds = step_time(*speed).total
        if not found:
            found.append(f"{needed_bytes(plan, where.spec) / 2**30:.1f}")
        exposed = exposed_seconds(*speed) / seconds
        found += [_short(plan.tokens / seconds), f"{100 * exposed:.1f} %"]
    return found


def _short(number: float) -> str:
    """A number with about three digits."""
    if number >= 1e6:
        return f"{number / 1e6:.3g}M"
    return f"{number / 1e3:.0f}k"


def block() -> str:
    """The block between the page's two comments: the options and the table."""
    where = f"--card {CARD} --gpus {PER_MACHINE} --machines N --network SIZE --shard-over …"
    text = f"{CARD.upper()}, {PER_MACHINE} per machine, fp8: `llmq plan {where}` with"
    lines = [BEGIN, text, ""]
    for name, text in (MODELS | {"both": COMMON}).items():
        lines += textwrap.wrap(f"{name:4}  {text}", 96, **INDENTED)
    lines += ["", "Predicted, not measured:", ""]
    head = ["GPUs", "over"]
    for name in MODELS:
        head.append(f"{name}: GiB each")
        head += [text for rate in NETWORKS for text in (f"{rate} GB/s: tokens/s", "exposed")]
    lines += [_row(head), _row(["---:", ":---", *["---:"] * (len(head) - 2)])]
    for machines, over in product(MACHINES, ("machine", "world")):
        if machines > 1 or over == "machine":
            row = [f"{machines * PER_MACHINE:,}", over if machines > 1 else ""]
            for name in MODELS:
                row += cells(name, machines, over)
            lines.append(_row(row))
    return "\n".join([*lines, END, ""])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Replace the page's block."""
    PAGE.write_text(BLOCK.sub(lambda _: block(), PAGE.read_text()))


if __name__ == "__main__":
    main()
