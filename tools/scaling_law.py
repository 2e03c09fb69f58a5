"""Measure and fit the scaling law that `llmq recipe` goes by.

python tools/scaling_law.py measure SWEEP.yaml --data DIR --out RUNS.json [--minutes M]
python tools/scaling_law.py fit RUNS.json... --out LAW.json --texts … [--picture LAW.png]

`measure` trains each run of a sweep file (as those of `llmq bench`, with options of data and
steps) on DIR/train*.bin, and notes its loss on DIR/eval*.bin. It goes on with a file that is there,
and begins no run after M minutes, so that it can be done in parts. `fit` finds the constants of

    L(N, D) = E + A / N^alpha + B / D^beta

for each optimizer that the runs have, with the least squares of relative errors: for each pair of
exponents the other three are a linear problem, and the pairs are searched on a grid that narrows.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import numpy as np
import typer

from llmq.base.errors import LlmqError
from llmq.base.files import write_file
from llmq.bench.losses import measure_losses
from llmq.bench.sweep_file import read_runs
from llmq.plan.law import LAYOUT, PASSES, Constants, worth

EXPONENTS = (0.05, 1.2)  # that are searched
GRID, ZOOMS = 24, 5  # points of an exponent, and how often the grid narrows to a third
RESAMPLES = 40
FEWEST = 8  # runs: five constants need some more

app = typer.Typer()


def fit(parameters: np.ndarray, tokens: np.ndarray, losses: np.ndarray) -> Constants:
    """The constants for runs, all arrays (n,). LlmqError if no positive ones describe them."""
    middle, width = np.full(2, np.mean(EXPONENTS)), np.ptp(EXPONENTS) / 2
    best: tuple[float, Constants] | None = None
    for _ in range(ZOOMS):
        axes = [np.linspace(max(m - width, 0.02), m + width, GRID) for m in middle]
        found = _best_of(*np.meshgrid(*axes), parameters, tokens, losses)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
        if best is not None:
            middle = np.array(best[1][3:])
        width /= 3
    if best is None:
        raise LlmqError("no positive constants describe these runs: are they long enough?")
    return best[1]


def _best_of(
    alphas: np.ndarray,
    betas: np.ndarray,
    parameters: np.ndarray,
    tokens: np.ndarray,
    losses: np.ndarray,
) -> tuple[float, Constants] | None:
    """The pair of exponents with the least error, of all whose other constants are positive."""
    alphas, betas = alphas.ravel(), betas.ravel()
    by_size = (parameters / parameters.min()) ** -alphas[:, None]
    by_tokens = (tokens / tokens.min()) ** -betas[:, None]
    columns = np.stack([np.ones_like(by_size), by_size, by_tokens], axis=-1) / losses[:, None]
    # The pseudoinverse, since a grid with few sizes may have columns that are hardly different.
    solved = np.linalg.pinv(columns, rcond=1e-9) @ np.ones(len(losses))
    errors = np.square((columns @ solved[..., None])[..., 0] - 1).mean(-1)
    errors[(solved <= 0).any(-1)] = np.inf
    at = int(np.argmin(errors))
    if not np.isfinite(errors[at]):
        return None
    (e, a, b), alpha, beta = solved[at], alphas[at], betas[at]
    scaled = (e, a * parameters.min() ** alpha, b * tokens.min() ** beta, alpha, beta)
    return float(errors[at]), Constants(*map(float, scaled))


def left_out(parameters: np.ndarray, tokens: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """(n,): the relative error of each run by a fit to all others."""
    errors = []
    for n in range(len(losses)):
        others = np.arange(len(losses)) != n
        law = fit(parameters[others], tokens[others], losses[others])
        errors.append(law.loss(parameters[n], tokens[n]) / losses[n] - 1)
    return np.array(errors)


def resampled(
    parameters: np.ndarray, tokens: np.ndarray, losses: np.ndarray, seed: int = 0
) -> list[Constants]:
    """Fits to random choices of the runs, with repetition; those that fail are left out."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(RESAMPLES):
        chosen = rng.integers(len(losses), size=len(losses))
        try:
            found.append(fit(parameters[chosen], tokens[chosen], losses[chosen]))
        except LlmqError:
            continue
    return found


def tokens_of(run: dict) -> float:
    """A run's tokens, those of further passes as a law counts them; older runs do not say."""
    return worth(run["tokens"], run.get("unique", math.inf), PASSES)


def arrays_of(runs: list[dict]) -> list[np.ndarray]:
    """Parameters, tokens and losses, each (n,)."""
    return [
        np.array([run["parameters"] for run in runs], float),
        np.array([tokens_of(run) for run in runs], float),
        np.array([run["loss"] for run in runs], float),
    ]


def law_record(runs: list[dict]) -> dict:
    """The part of a law's file that is of one optimizer."""
    arrays = arrays_of(runs)
    if len(runs) < FEWEST:
        raise LlmqError(f"{len(runs)} runs are too few for five constants: make at least {FEWEST}")
    off = left_out(*arrays)
    law = fit(*arrays)
    largest = np.argsort(arrays[0] * arrays[1])[-max(len(runs) // 5, 1) :]
    others = np.setdiff1d(np.arange(len(runs)), largest)
    ahead = fit(*(each[others] for each in arrays))
    beyond = [ahead.loss(arrays[0][n], arrays[1][n]) / arrays[2][n] - 1 for n in largest]
    return {
        "constants": [list(each) for each in (law, *resampled(*arrays))],
        "off": float(np.sqrt(np.mean(off**2))),
        "largest_by_others": [round(float(each), 5) for each in beyond],
        **{
            name: [float(a.min()), float(a.max())]
            for name, a in zip(("parameters", "tokens"), arrays[:2], strict=True)
        },
        "runs": len(runs),
    }


@app.command()
def measure(
    sweep: Path,
    data: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option()],
    minutes: Annotated[float, typer.Option(min=0)] = 0,
) -> None:
    """Train the runs of SWEEP in their order."""
    files = {"train-file": f"{data}/train*.bin", "eval-file": f"{data}/eval*.bin"}
    rows = read_runs(files, sweep, trains=True)
    done = measure_losses(rows, out, seconds=60 * minutes)
    print(f"{len(done)} of {len(rows)} runs are done")


@app.command("fit")
def fit_files(
    files: list[Path],
    out: Annotated[Path, typer.Option()],
    texts: Annotated[str, typer.Option(help="What the data are of, for whoever reads it.")],
    picture: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Fit the law to all runs of FILES, and print what it says of each."""
    reports = [json.loads(file.read_text()) for file in files]
    runs = [run for report in reports for run in report["runs"]]
    tokenizers = {report["tokenizer"] for report in reports}
    if len(tokenizers) > 1:
        raise LlmqError("the runs have different tokenizers: their losses are no one law")
    devices = sorted({report["device"] for report in reports})
    record = {
        "layout": LAYOUT,
        "source": f"a fit to {len(runs)} runs of this program on {texts} ({', '.join(devices)})",
        "tokenizer": tokenizers.pop(),
        "optimizers": {},
    }
    for name in sorted({run["optimizer"] for run in runs}):
        own = [run for run in runs if run["optimizer"] == name]
        record["optimizers"][name] = law_record(own)
        _tell(name, own, record["optimizers"][name])
    write_file(out, json.dumps(record, indent=1) + "\n")
    if picture is not None:
        _draw(runs, record["optimizers"], picture)


def _tell(name: str, runs: list[dict], record: dict) -> None:
    law = Constants(*record["constants"][0])
    constants = f"{law.E:.3f} + {law.A:.4g} / N^{law.alpha:.3f} + {law.B:.4g} / D^{law.beta:.3f}"
    print(f"{name}: {constants}, runs are off by {100 * record['off']:.2f} % without them")
    ahead = ", ".join(f"{100 * each:+.2f} %" for each in record["largest_by_others"])
    print(f"the largest, predicted by the others: {ahead}")
    for run in sorted(runs, key=lambda run: (run["parameters"], run["tokens"])):
        found = law.loss(run["parameters"], tokens_of(run))
        print(
            f"{run['parameters'] / 1e6:8.2f}M {run['tokens'] / 1e6:8.1f}M tokens: "
            f"{run['loss']:.4f}, law {found:.4f} ({100 * (found / run['loss'] - 1):+.2f} %)"
        )


def _draw(runs: list[dict], laws: dict, picture: Path) -> None:
    """Losses by tokens, a colour for each size, and the law as lines."""
    figure, axes = plt.subplots(1, len(laws), figsize=(6 * len(laws), 4.5), squeeze=False)
    for axis, (name, record) in zip(axes[0], laws.items(), strict=True):
        law = Constants(*record["constants"][0])
        sizes = sorted({run["parameters"] for run in runs if run["optimizer"] == name})
        for place, size in enumerate(sizes):
            own = [r for r in runs if r["parameters"] == size and r["optimizer"] == name]
            points = np.stack(arrays_of(own)[1:], axis=1)
            points = points[np.argsort(points[:, 0])]
            color = plt.cm.viridis(place / max(len(sizes) - 1, 1))
            axis.plot(*points.T, "o", color=color, label=f"{size / 1e6:.1f}M")
            line = np.geomspace(points[0, 0], points[-1, 0], 50)
            axis.plot(line, [law.loss(size, tokens) for tokens in line], color=color)
        axis.set(xscale="log", xlabel="tokens", ylabel="validation loss", title=name)
        axis.legend(title="parameters")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    try:
        app()
    except LlmqError as error:
        sys.exit(f"error: {error}")
