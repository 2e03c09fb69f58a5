"""What a run reports: console lines in llm.q's shapes, and the JSON log.

The log is one JSON array that is complete after every record. Numbers that are not finite are
written as null.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmq.files import disk_errors
from llmq.step import Result


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {k: _json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v) for v in value]
    return value


class JsonLog:
    """A JSON array on disk, one record a line, closed after each."""

    def __init__(self, path: Path):
        """Replaces what is at path. LlmqError where it cannot be written."""
        self.path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "w+", encoding="utf-8")  # noqa: SIM115 - lives as long as self
            self._file.write("[\n]\n")
            self._file.flush()
        self._empty = True

    def write(self, log: str, step: int, **fields: Any) -> None:
        """Add one record; every record has `log`, `time` (UTC) and `step`."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f") + "000"
        record = {"log": log, "time": now, "step": step} | _json_value(fields)
        line = ("" if self._empty else ",\n") + "  " + json.dumps(record) + "\n]\n"
        with disk_errors(self.path):
            # Before the closing "\n]\n", or behind the "[\n" of an array that is still empty.
            end = self._file.seek(0, 2)
            self._file.seek(end - (2 if self._empty else 3))
            self._file.write(line)
            self._file.flush()
        self._empty = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class View(Protocol):
    """Where lines go: plain output, or the live view of a terminal."""

    def line(self, text: str, *, bold: bool = False) -> None:
        """Show one line of the log."""

    def progress(self, **state: Any) -> None:
        """Update what is shown beside the log; keys as in live.LiveView."""

    def close(self) -> None:
        """Stop showing."""


class PlainView:
    """Lines to standard output, as they come."""

    def line(self, text: str, *, bold: bool = False) -> None:
        bold = bold and sys.stdout.isatty()
        print(f"\033[1m{text}\033[22m" if bold else text, flush=True)

    def progress(self, **state: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Outliers:
    """Z-score of a value against the last 100, which it then joins."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=100)

    def score(self, value: float) -> float:
        """0 until there are 100 values, and for values that are not finite."""
        score = 0.0
        if not math.isfinite(value):
            return score
        if len(self._window) == self._window.maxlen:
            std = float(np.std(self._window))
            score = (value - float(np.mean(self._window))) / std if std > 0 else 0.0
        self._window.append(value)
        return score


def count_tokens(n: int) -> str:
    """A token count in the width of four digits and a unit."""
    for limit, unit, digits in (
        (1e6, 1e3, "k"), (2e7, 1e6, ".M"), (1e9, 1e6, "M"), (2e10, 1e9, ".B"), (1e12, 1e9, "B"),
        (2e13, 1e12, ".T"),
    ):  # fmt: skip
        if n < limit:
            return f"{n / unit:4.1f}{digits[1]}" if digits[0] == "." else f"{int(n / unit):4d}{digits}"
    return f"{int(n / 1e12):4d}T"


def tokens_per_second(tokens: int, milliseconds: float) -> str:
    """Below 100 thousand in full, then in thousands; "-" where no time passed."""
    if milliseconds < 1:
        return "-"
    rate = int(tokens * 1000 / milliseconds)
    return f"{rate:5d}" if rate < 100_000 else f"{rate // 1000:4d}k"


def duration(milliseconds: float) -> str:
    """Milliseconds, or seconds from 100 seconds on, in a fixed width."""
    if milliseconds < 100_000:
        return f"{int(milliseconds):5d} ms"
    return f"{int(milliseconds / 1000):5d}  s"


class Reporter:
    """Console and log of one run; rank 0 has it."""

    def __init__(self, log: JsonLog, view: View, total_steps: int):
        self.log, self.view, self.total_steps = log, view, total_steps
        self._losses: list[float] = []  # since the last evaluation
        self._loss_outliers, self._norm_outliers = Outliers(), Outliers()

    def block(self, title: str, lines: list[str]) -> None:
        """A titled block and an empty line."""
        self.view.line(f"[{title}]")
        for line in [*lines, ""]:
            self.view.line(line)

    def message(self, text: str, step: int = 0, **fields: Any) -> None:
        """One line on the console and in the log."""
        self.view.line(text)
        self.log.write("info", step, type="message", message=text, **fields)

    @contextmanager
    def section(self, text: str, step: int = 0) -> Iterator[None]:
        """Name a long action before it begins and say afterwards how long it took."""
        self.view.line(f"{text} ...")
        start = time.perf_counter()
        yield
        ms = int((time.perf_counter() - start) * 1000)
        self.view.line(f"  done in {ms} ms" if ms < 2000 else f"  done in {ms // 1000} s")
        self.view.line("")
        self.log.write("info", step, type="message", message=text, duration_ms=ms)

    def _percent(self, step: int) -> float:
        return 100.0 * step / max(self.total_steps, 1)

    def train_step(
        self, step: int, result: Result, lr: float, ms: float, tokens: int, sol: float | None
    ) -> None:
        """[T]: step, from 0. tokens: of the whole step, masked ones too. sol: in percent."""
        rate = tokens_per_second(tokens, ms)
        tail = "" if sol is None else f" | sol {sol:.1f}%"
        self.view.line(
            f"[T] step {step:5d} [{self._percent(step):4.1f}%] | time: {duration(ms)} | norm "
            f"{result.norm:10f} | loss {result.loss:10f} | tps {rate}{tail}"
        )
        self._losses.append(result.loss)
        for name, value, window in (
            ("Loss", result.loss, self._loss_outliers),
            ("Gradient norm", result.norm, self._norm_outliers),
        ):
            score = window.score(value)
            if score > 10:
                self.message(f"{name} outlier with z-score: {score:.1f}", step)
        self.log.write(
            "step",
            step,
            step_tokens=tokens,
            duration_ms=int(ms),
            norm=result.norm,
            loss=result.loss,
            lr=lr,
            lse_max=result.lse_max,
            lse_mean=result.lse_mean,
            loss_1k=result.loss_1k,
        )
        self.view.progress(
            step=step + 1, loss=result.loss, norm=result.norm, lr=lr, ms=ms, tokens=tokens
        )

    def evaluation(self, step: int, result: Result, ms: float, tokens: int) -> None:
        """[V]: the evaluation before step `step`. tokens: that were run."""
        train = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self._losses.clear()
        self.view.line(
            f"[V] step {step:5d} [{self._percent(step):4.1f}%] | time: {duration(ms)} | eval "
            f"{result.loss:10f} | train {train:9f} | tps {tokens_per_second(tokens, ms)}",
            bold=True,
        )
        self.log.write(
            "eval",
            step,
            eval_tokens=tokens,
            duration_ms=int(ms),
            loss=result.loss,
            loss_1k=result.loss_1k,
        )
        self.view.progress(eval_loss=result.loss)

    def close(self) -> None:
        """Close the view and the log."""
        self.view.close()
        self.log.close()
