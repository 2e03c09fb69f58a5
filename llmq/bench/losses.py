"""Final losses of many short runs in a process, for sweeps of learning rates and for scaling laws.

`llmq sweep-lr` trains a small model at each of several learning rates, for `llmq recipe`. Runs that
differ only in rates and length share a trainer: each run starts from the same first weights and the
same data, without another start-up.
"""

import dataclasses
import json
import math
import time
from collections.abc import Hashable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import read_json, write_file
from llmq.bench.sweep_file import Row, identity, read_runs
from llmq.options.loss_params import named_texts, part_rates
from llmq.options.option_types import MUONS
from llmq.options.options import OPTIONS, TrainConfig
from llmq.options.options_io import make_config
from llmq.plan.recipe import BASE, TABLES, round_rate, sizes_of
from llmq.report.json_log import JsonLog
from llmq.run.batches import move_loaders
from llmq.run.model_of_run import agreed_tokenizer, model_of_run
from llmq.run.trainer import Trainer
from llmq.state.params import parameter_count

LAST = 20  # number of last steps, whose mean loss becomes `train_loss`
_BY_STEP = ("steps", "warmup", "cooldown", "final_lr_fraction", "lr_schedule", "log_file")


def measure_losses(
    rows: list[Row], out: Path, *, seconds: float = 0, logs: Path | None = None
) -> list[dict[str, Any]]:
    """Train a run for each row of sweep_file.read_runs. Returns the records of all finished runs,
    in the order of rows.

    out: the report, written after each run; runs that are in the report already are not repeated.
    seconds: time after which no run begins; 0: no limit. logs: a folder for a JSON log of each run,
    which `llmq plot` reads; a record's `log` is the file's name. A run ends at the first loss that
    is not finite; `loss` is then None. Raises ConfigError for a report of another device or
    tokenizer, or a row that cannot be swept.
    """
    report = read_json(out) if out.is_file() else {"device": None, "tokenizer": None, "runs": []}
    for row in rows:
        config = make_config(row)
        if config.steps < 1:
            raise ConfigError(f"--steps: a run of a sweep needs at least 1, got {config.steps}")
        if not config.learning_rate:
            raise ConfigError("--learning-rate: a run of a sweep needs one above 0")
        if config.wants_adapters:
            raise ConfigError("--lora-rank: adapters need a trained model, these begin with none")
    done = {identity(run["options"]): run for run in report["runs"]}
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        if identity(row) not in done:
            groups.setdefault(_shared(make_config(row)), []).append(row)
    end = time.monotonic() + (seconds or math.inf)
    for group in groups.values():
        if time.monotonic() > end:
            break
        config = make_config(group[0])
        model, model_dir = model_of_run(config)
        tokenizer = agreed_tokenizer(config, model_dir)
        with Trainer.from_config(
            config.validate_with(model), model, model_dir, tokenizer
        ) as trainer:
            origin = {
                "device": trainer.dev.spec.name,
                "tokenizer": tokenizer and tokenizer.fingerprint,
            }
            for key, value in origin.items():
                if report[key] not in (None, value):
                    raise ConfigError(f"--out: {out} is of {key} {report[key]}, and not of {value}")
            report |= origin
            for row in group:
                if time.monotonic() > end:
                    break
                run_config = make_config(row)
                name = row.get("name", run_config.optimizer)
                log = None if logs is None else logs / _log_name(name, run_config, report["runs"])
                record = {"options": row} | _run(trainer, run_config, log)
                report["runs"].append(record)
                done[identity(row)] = record
                write_file(out, json.dumps(report, indent=1) + "\n")
                print(run_line(record), flush=True)
    return [done[identity(row)] for row in rows if identity(row) in done]


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the lowest loss."""
    return min(runs, key=lambda run: math.inf if run["loss"] is None else run["loss"])


def loss_of(run: dict[str, Any]) -> str:
    """Return the run's loss as console text."""
    return "diverged" if run["loss"] is None else f"{run['loss']:.4f}"


def run_line(record: dict[str, Any]) -> str:
    """Return a line about a run for the console."""
    return (
        f"{record['parameters'] / 1e6:7.2f}M parameters, {record['tokens'] / 1e6:7.1f}M tokens, "
        f"{record['optimizer']} at {record['learning_rate']:.3g}: loss {loss_of(record)}, "
        f"{record['seconds']:.1f} s"
    )


def _shared(config: TrainConfig) -> TrainConfig:
    """Return the config that all runs of a trainer share: all rates are divided by the learning
    rate, and options about steps have default values."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    # The captured update holds the quotients of rates as constants.
    rate, muon_lr = config.learning_rate, config.muon_lr
    parts = named_texts({name: own / rate for name, own in part_rates(config.lr_parts).items()})
    quotients = {"muon_lr": muon_lr and muon_lr / rate, "lr_parts": parts}
    return replace(config, learning_rate=1.0, **quotients, **{n: defaults[n] for n in _BY_STEP})


def _log_name(way: str, config: TrainConfig, runs: list[dict[str, Any]]) -> str:
    """Return a file name that no run of the report has yet."""
    name = f"{way}-{config.learning_rate:g}-{config.steps}"
    alike = [run for run in runs if run.get("log", "").startswith(name)]
    return f"{name}-{len(alike) + 1}.json" if alike else f"{name}.json"


def _run(trainer: Trainer, config: TrainConfig, log: Path | None) -> dict[str, Any]:
    """Train a run from the first weights and the start of the data; return the run's record."""
    start, tokens = time.monotonic(), trainer.plan.tokens
    trainer.restart()
    move_loaders(trainer.train_loaders, {})
    ticket, course = None, []
    for step in range(config.steps):
        trainer.advance_epoch_if_needed()
        before, ticket = ticket, trainer.enqueue_step(lr=config.rate(step, config.steps))
        if before is not None:
            course.append(trainer.result(before))
            if not math.isfinite(course[-1].loss):
                break
    course.append(trainer.result(ticket))
    trained = fmean(result.loss for result in course[-LAST:])
    finite = math.isfinite(trained)
    found = trainer.validate(config.eval_num_steps).loss if finite else math.nan
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        with closing(JsonLog(log)) as records:
            for step, result in enumerate(course):
                numbers = {"loss": result.loss, "norm": result.norm}
                numbers["lr"] = config.rate(step, config.steps)
                records.write("step", step, step_tokens=tokens, **numbers)
            records.write("eval", len(course), loss=found)
    return ({} if log is None else {"log": log.name}) | {
        "optimizer": config.optimizer,
        "parameters": parameter_count(trainer.model),
        "width": trainer.model.hidden_size,
        "tokens": config.steps * tokens,
        "unique": trainer.steps_per_epoch * tokens,
        "tokens_per_step": tokens,
        "learning_rate": config.learning_rate,
        "train_loss": trained if finite else None,
        "loss": found if math.isfinite(found) else None,
        "seconds": round(time.monotonic() - start, 2),
    }


STEP = 2.0  # ratio of neighbouring learning rates of the ladder
MOST_FURTHER = 3  # most further rates, added while the best rate is an end of the ladder
FEWEST = 3  # least number of rates, as a parabola needs three points
# Defaults of options that are not given. By default a model of four blocks trains on 16 million
# tokens, three tokens for each parameter. These are too few tokens for the lowest loss, but enough
# to rank rates.
USUAL = {"batch-size": 16, "grad-accumulation": 1, "steps": 1000, "eval-num-steps": 32}
USUAL |= {"learning-rate": 0.002, "lr-schedule": "linear", "final-lr-fraction": 0.0}
OF_MUON = {"learning-rate": 0.016}  # rate of the parameters that AdamW trains


def run_sweep_lr(given: dict[str, Any], *, depth: int, rates: int, out: Path) -> None:
    """Train a model of `depth` blocks at each rate of a ladder, and write the best rate to `out`.
    given: options of the runs, by flag name. rates: number of rates, spaced by a factor of STEP
    around --learning-rate. The ladder grows by at most MOST_FURTHER rates while the best rate is an
    end. Raises ConfigError or LlmqError."""
    if rates < FEWEST:
        raise ConfigError(f"--rates: must be at least {FEWEST}, got {rates}")
    base = {"model": BASE, "from-scratch": True, "vocab-size": "auto"}
    base |= {OPTIONS[name].flags[0]: size for name, size in sizes_of(depth).items()}
    usual = USUAL | (OF_MUON if given.get("optimizer") in MUONS else {})
    base = ({} if "model" in given else base) | usual | given
    middle = float(base["learning-rate"])
    base.setdefault("warmup", max(int(base["steps"]) // 20, 1))
    ladder = [middle * STEP ** (n - rates // 2) for n in range(rates)]
    found = _measured(base, ladder, out)
    for _ in range(MOST_FURTHER):
        place = found.index(best_of(found))
        if 0 < place < len(found) - 1:
            break
        further = found[place]["learning_rate"] * (STEP if place else 1 / STEP)
        found = _measured(base, [run["learning_rate"] for run in found] + [further], out)
    rate = lowest(found)
    first = found[0]
    result = {
        "rate": rate,
        "width": first["width"],
        "optimizer": first["optimizer"],
        "tokens": first["tokens"],
        "tokens_per_step": first["tokens_per_step"],
        "muon_share": first["options"].get("muon-lr", first["learning_rate"])
        / first["learning_rate"],
    }
    write_file(out, json.dumps(result | read_json(out), indent=1) + "\n")
    for run in found:
        mark = "  <" if run is best_of(found) else ""
        print(f"  {run['learning_rate']:10.3g}  {loss_of(run)}{mark}")
    print(f"The best rate of {first['optimizer']} at {first['width']} channels: {rate:g}")
    print(f"llmq recipe --hours … --rates {out}")


def _measured(own: Row, ladder: list[float], out: Path) -> list[dict[str, Any]]:
    """Measure a run at each learning rate of `ladder`, in ascending order."""
    rows = [own | {"learning-rate": round_rate(rate)} for rate in sorted(ladder)]
    if own.get("optimizer") in MUONS:
        rows = [{"muon-lr": row["learning-rate"] / TABLES} | row for row in rows]
    for row in rows:
        read_runs(row, None, trains=True)
    return measure_losses(rows, out)


def lowest(runs: list[dict[str, Any]]) -> float:
    """Return the minimum of a parabola in log(rate) through the best run and its neighbours. If the
    best run is an end of the ladder, return its rate. Raises LlmqError if all runs diverged."""
    place = runs.index(best_of(runs))
    rate, losses = runs[place]["learning_rate"], [run["loss"] for run in runs]
    if losses[place] is None:
        raise LlmqError("all runs diverged: begin with a lower --learning-rate")
    if not 0 < place < len(runs) - 1 or None in losses[place - 1 : place + 2]:
        return rate
    left_loss, middle_loss, right_loss = losses[place - 1 : place + 2]
    curvature = left_loss - 2 * middle_loss + right_loss
    shift = 0.5 * (left_loss - right_loss) / curvature if curvature > 0 else 0.0
    return round_rate(rate * STEP**shift)
