"""`llmq plot`: the loss curves of one or more JSON logs as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.base.files import disk_errors, replacing

SMOOTHING = 10  # steps to each side
FORMATS = (".png", ".svg", ".pdf")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log; DataError where it cannot be read or has nothing to plot."""
    try:
        records = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the log '{path}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is not a log of llmq train: {error}") from None
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise DataError(f"'{path}' is not a log of llmq train: it holds no array of records")
    points = [r for r in records if r.get("log") in ("step", "eval")]
    if not points:
        raise DataError(f"'{path}' has nothing to plot: no step was made")
    for r in points:
        # A loss of null was not finite; one that is missing is an error.
        if type(r.get("step")) is not int or not isinstance(r.get("loss", ""), float | int | None):
            raise DataError(
                f"'{path}' is not a log of llmq train: a record of {r['log']} has step "
                f"{r.get('step')!r} and loss {r.get('loss')!r}, not numbers"
            )
    return records


def curve(records: list[dict[str, Any]], log: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of the records of one kind, F64; a loss that was not finite is NaN.

    Where a resumed run repeated steps, the later record counts.
    """
    losses = {r["step"]: r["loss"] for r in records if r.get("log") == log}
    values = [np.nan if losses[s] is None else losses[s] for s in sorted(losses)]
    return np.array(sorted(losses), float), np.array(values, float)


def smoothed(values: np.ndarray, reach: int = SMOOTHING) -> np.ndarray:
    """The mean over a window of `reach` values to each side, fewer at the ends, NaN left out."""
    finite = np.isfinite(values)
    window = np.ones(2 * reach + 1)
    inside = slice(reach, reach + len(values))
    total = np.convolve(np.where(finite, values, 0.0), window)[inside]
    count = np.convolve(finite.astype(float), window)[inside].round()
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _name(path: Path) -> str:
    """The name of a log as a label, in which matplotlib gives `$` and a first `_` a meaning."""
    name = path.stem.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def run_plot(logs: list[Path], out: Path) -> None:
    """Draw training losses (faint), their smoothed curves, and evaluation losses."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out: '{out}' must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="tight")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for number, path in enumerate(logs):
        records = read_log(path)
        color = f"C{number % 10}"  # matplotlib's names of its ten colours
        steps, losses = curve(records, "step")
        if len(steps):
            axes.plot(steps, smoothed(losses), color=color, label=f"{_name(path)}: training")
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        steps, losses = curve(records, "eval")
        if len(steps):
            axes.plot(steps, losses, "o--", color=color, label=f"{_name(path)}: evaluation")
    axes.grid(alpha=0.3)
    axes.legend()
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as file:
        figure.savefig(file, format=out.suffix[1:].lower())
    print(f"wrote {out}")
