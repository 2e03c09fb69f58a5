"""`llmq plot`: the loss curves of one or more JSON logs as a PNG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from llmq.errors import DataError
from llmq.files import disk_errors

SMOOTHING = 10  # steps to each side


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log; DataError where it cannot be read."""
    try:
        records = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"cannot read the log '{path}': {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"'{path}' is not a log of llmq train: {error}") from None
    if not isinstance(records, list) or not any(r.get("log") == "step" for r in records):
        raise DataError(f"'{path}' has no training steps to plot")
    return records


def curve(records: list[dict[str, Any]], log: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of the records of one kind; a loss that was not finite is NaN."""
    rows = [(r["step"], np.nan if r["loss"] is None else r["loss"]) for r in records if r["log"] == log]
    return np.array([s for s, _ in rows]), np.array([loss for _, loss in rows], float)


def smoothed(values: np.ndarray, reach: int = SMOOTHING) -> np.ndarray:
    """The mean over a window of `reach` values to each side, NaN left out."""
    ones = np.ones(2 * reach + 1)
    finite = np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), ones)[reach : reach + len(values)]
    count = np.convolve(finite.astype(float), ones)[reach : reach + len(values)]
    return total / np.maximum(count, 1)


def run_plot(logs: list[Path], out: Path) -> None:
    """Draw training losses (faint), their smoothed curves, and evaluation losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), dpi=120)
    for path in logs:
        records = read_log(path)
        steps, losses = curve(records, "step")
        (line,) = axes.plot(steps, smoothed(losses), label=f"{path.stem}: training")
        axes.plot(steps, losses, color=line.get_color(), alpha=0.25, linewidth=0.8)
        steps, losses = curve(records, "eval")
        axes.plot(steps, losses, "o--", color=line.get_color(), label=f"{path.stem}: evaluation")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    plt.close(figure)
    print(f"wrote {out}")
