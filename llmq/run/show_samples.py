"""`llmq show` for a run of `llmq rl`: prints the best and the worst samples of a step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmq.base.console import print_own, printable
from llmq.base.errors import DataError
from llmq.base.files import read_errors
from llmq.run.rewards import REWARD
from llmq.text.show import Marks, marks_here

SHOWN = 3  # default number of best samples, and of worst samples


def run_show_samples(path: Path, step: int | None, limit: int | None) -> None:
    """Print the best and the worst samples of a step, `limit` of each kind. step: None: the newest
    step."""
    rows = _rows_of(path, step)
    scored = [row for row in rows if "rewards" in row]
    if not rows:
        raise DataError(
            f"'{path}' has no samples" + (f" of step {step}" if step is not None else "")
        )
    marks, limit = marks_here(), SHOWN if limit is None else limit
    scored.sort(key=lambda row: -row["rewards"][REWARD])
    for row in (row for row in rows if "rewards" not in row):
        print(f"--- no reward: {row['error']} ---")
    best, worst = scored[:limit], scored[max(len(scored) - limit, limit) :]
    for label, some in (("best", best), ("worst", worst)):
        for row in some:
            _show(label, row, marks)
    mean = sum(row["rewards"][REWARD] for row in scored) / max(len(scored), 1)
    print(f"step {rows[0]['step']}: {len(rows)} samples, mean reward {mean:.4g}")


def _rows_of(path: Path, step: int | None) -> list[dict[str, Any]]:
    """Return the rows of a step; a last line that is still being written is left out."""
    rows: list[dict[str, Any]] = []
    with read_errors(path), open(path, encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):
                row = json.loads(line)
                if step is None and rows and rows[0]["step"] != row["step"]:
                    rows = []
                if step in (None, row["step"]):
                    rows.append(row)
    return rows


def _show(label: str, row: dict[str, Any], marks: Marks) -> None:
    rewards = row["rewards"]
    parts = [f"{name} {value:.4g}" for name, value in rewards.items() if name != REWARD]
    more = f" ({', '.join(parts)})" if parts else ""
    head = f"--- {label}: reward {rewards[REWARD]:.4g}{more}, advantage {row['advantage']:.3g}"
    print(f"{head}, {row['finish']} ---")
    prompt = row["prompt"] if isinstance(row["prompt"], str) else _of_messages(row["prompt"])
    (masked, masked_end), (trained, trained_end) = marks.masked, marks.trained
    text = f"{masked}{printable(prompt)}{masked_end}{trained}{printable(row['text'])}{trained_end}"
    print_own(text)


def _of_messages(messages: Iterable[dict[str, Any]]) -> str:
    return "".join(f"{m.get('role')}: {m.get('content')}\n" for m in messages)
