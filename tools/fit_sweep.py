#!/usr/bin/env python3
"""Check what --fit finds: measure every rival of it that could be faster, for memories and models.

    PYTHONPATH=. tools/fit_sweep.py plan --card h100 --model Qwen2.5-1.5B --memory 16GiB fit.json
    PYTHONPATH=. tools/fit_sweep.py run --seconds 300 fit.json
    PYTHONPATH=. tools/fit_sweep.py table fit.json > fit.md

`plan` needs no GPU. It goes through all combinations of micro-batch, recomputation, offloading,
streaming, transposed codes, and chunks of the LM head, each with recomputation in as few layers as
will do. A rival is left out where its predicted speed is --within percent below that of what --fit
finds: where predictions are within e percent, and it is asked whether anything is more than 3
percent faster, 2 e - 3 are enough. Also where another one does a part of its work and nothing else,
or exactly the same. The file may hold several models and memories: others than these stay in it,
and so does all that was measured of these, with its date. After a change of the program begin a new
file, or what an older one measured stands beside what is predicted of the newer one.

`run` measures in one process, each row as soon as the one before is done, and notes each in its
file at once: run again, it goes on with those that are missing. Steps are short (--sequences),
because options are what is compared. The rows that --fit finds come first, of all models and
memories. Then always the row that is likeliest, by what was measured so far, to be 3 percent faster
than that. It needs x percent if for this it would have to beat its prediction by x percent more
than any measured row of its model, in whatever memory, beats its own; the one that needs the least
comes next. So wherever `run` ends, all combinations that were not measured need at least what
`table` says, those that `plan` has left out for their speed included, and also those that do all
that another row does and more, unless that one was measured: then they are taken to be no faster,
whatever is predicted. A factor that is wrong in all predictions of a model does not matter to that,
and how far they scatter is not assumed, but seen. With --enough rows that need more are left out.
Where a row is that much faster, the others of its model and memory come last. Whatever was measured
is in the file and in the table.

A row that fails in a process that has measured others, whose libraries take memory, too, ends the
process, and the next one begins with it.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import write_file
from llmq.bench.measure import open_trainer, predicted_speed, random_batches, timed_steps
from llmq.options.option_file import command_line
from llmq.options.option_types import parse_size
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.estimate import RECOMPUTE, Planner
from llmq.plan.fit import Candidate, Fit
from llmq.plan.target import MachineOptions, target

BATCHES = (1, 2, 4, 8, 16, 32)
AGAIN = ("", "swiglu", "norm swiglu", "norm ffn", "norm ffn qkv", "norm swiglu att")
AGAIN += ("norm ffn att", "ffn", "ffn att", "block")
AWAY = ("", "residual", "opt_m opt_v master", "residual opt_m opt_v master")
WEIGHTS = {"shard_weights": True}
STREAMED = ({}, WEIGHTS, WEIGHTS | dict.fromkeys(
    ("shard_gradients", "offload_gradients", "offload_quants", "persistent_quants"), True
))  # fmt: skip
CHUNKS = (1, 4, 16)
SHARED = {
    "from-scratch": True,
    "model-dtype": "bf16",
    "matmul-dtype": "e4m3",
    "fp8-recipe": "delayed",
    "opt-m-dtype": "bf16",
    "opt-v-dtype": "bf16",
    "seq-len": 1024,
    "gpus": 1,
    "device": "cuda",
    "watchdog": 0,
}
# Options that cost time and save memory: with fewer of them a run is not slower.
SAVERS = (
    *(*RECOMPUTE, "offload_residual", "offload_master", "offload_opt_m", "offload_opt_v"),
    *("offload_gradients", "shard_weights", "shard_gradients"),
)
# Others do this, too: a block is all that can be recomputed, and the MLP ends with its SwiGLU.
INCLUDED = {"recompute_block": frozenset(RECOMPUTE), "recompute_ffn": {"recompute_swiglu"}}
SAME = ("batch_size", "persistent_quants", "offload_quants")
CLAIM = 3.0  # percent that nothing should be faster by than what --fit finds
# The second step is captured. Then clocks settle, of long steps within one.
WARM_UP, SETTLE = 2, 0.8  # steps; seconds of steps at least, the first one not counted
# Seconds of a repeat, about; repeats, of steps that take longer than this two.
TIMED, REPEATS, LONG_REPEATS = 0.5, 3, 2

HIDDEN = {*SHARED, "model", "memory-limit"}  # in the table: the same in all rows

app = typer.Typer(add_completion=False)


def flags_of(config: TrainConfig) -> dict[str, Any]:
    """The options of a configuration by flag, as files of options have them."""
    found: dict[str, Any] = {}
    for word in command_line(config)[2:]:
        name, equals, value = word.removeprefix("--").partition("=")
        found[name.removeprefix("no-")] = value if equals else not name.startswith("no-")
    return found


def grid(base: TrainConfig, sequences: int) -> Iterator[TrainConfig]:
    """Every combination that options allow, each of the same number of sequences, those with the
    fewest savers first."""
    found = []
    for batch, again, away, streamed, chunks, kept in itertools.product(
        BATCHES, AGAIN, AWAY, STREAMED, CHUNKS, (True, False)
    ):
        if sequences % batch:
            continue
        changes: dict[str, Any] = {f"recompute_{name}": True for name in again.split()}
        changes |= {f"offload_{name}": True for name in away.split()}
        changes |= streamed | {"keep_transposed": kept}
        changes |= {"batch_size": batch, "grad_accumulation": sequences // batch}
        changes |= {"lmhead_chunks": chunks, "attn_bwd_chunks": min(chunks, batch)}
        try:
            found.append(replace(base, **changes).normalized())
        except ConfigError:
            continue
    return iter(sorted(dict.fromkeys(found), key=lambda config: len(_savers(config))))


def _savers(config: TrainConfig) -> frozenset[str]:
    names = {name for name in SAVERS if getattr(config, name)}
    names |= {"no transposed codes"} if not config.keep_transposed else set()
    return frozenset(names.union(*(INCLUDED.get(name, ()) for name in names)))


def _layers(config: TrainConfig) -> float:
    """In how many something is recomputed: "0-N", "0" or all of them, as --fit has them."""
    if not any(getattr(config, name) for name in RECOMPUTE):
        return 0
    layers = config.recompute_layers
    return math.inf if layers == "all" else int(layers.removeprefix("0-")) + 1


def does_less(one: TrainConfig, other: TrainConfig) -> bool:
    """Whether all that `one` does `other` does too, and it does more."""
    if one == other or any(getattr(one, name) != getattr(other, name) for name in SAME):
        return False
    pairs = [(_savers(one), _savers(other)), (_layers(one), _layers(other))]
    pairs += [(getattr(one, n), getattr(other, n)) for n in ("lmhead_chunks", "attn_bwd_chunks")]
    return all(a <= b for a, b in pairs)


def rivals(
    planner: Planner, fit: Fit, configs: Iterator[TrainConfig], within: float
) -> tuple[Candidate, list[Candidate]]:
    """The configuration that --fit finds, and those that fit and are predicted to be almost as
    fast, or faster."""
    best = fit.search()[0]
    least = best.need.speed * (1 - within / 100)
    slow: set[TrainConfig] = set()
    found: list[TrainConfig] = []

    def worth(config: TrainConfig) -> bool:
        """Whether it may be fast enough with recomputation in no layer at all."""
        plain = replace(config, **dict.fromkeys(RECOMPUTE, False)).normalized()
        if plain not in slow and planner.estimate(plain).speed < least:
            slow.add(plain)
        return plain not in slow

    for config in configs:
        if not worth(config) or any(does_less(known, config) for known in found):
            continue
        need = planner.estimate(config)
        if fit.limits.excess(need.device, need.host):
            continue
        if need.speed >= least or _savers(config) & set(RECOMPUTE):
            config = fit._fewer_layers(config)
            if planner.estimate(config).speed >= least:
                found.append(config)
    known = [best.config, *found]
    found = [c for c in dict.fromkeys(found) if not any(does_less(o, c) for o in known)]
    exact = [Candidate(config=c, need=planner.exact(c)) for c in found if c != best.config]
    exact = [c for c in exact if not fit.limits.excess(c.need.device, c.need.host)]
    exact.sort(key=lambda candidate: -candidate.need.speed)
    # Those that launch the same are measured once, the one with the fewest savers, which stable
    # sorting has first.
    alike = {(c.config.batch_size, round(c.need.speed, 3)): c for c in reversed(exact)}
    return best, sorted(alike.values(), key=lambda candidate: -candidate.need.speed)


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(help="To write, JSON.")],
    model: Annotated[list[str], typer.Option()],
    memory: Annotated[list[str], typer.Option(help="Of the GPU that it is for.")],
    card: Annotated[str | None, typer.Option()] = None,
    card_file: Annotated[Path | None, typer.Option(help="Report of llmq rig.")] = None,
    host_memory: Annotated[str, typer.Option()] = "100GiB",
    within: Annotated[float, typer.Option(help="Percent of the best predicted speed.")] = 7.0,
    sequences: Annotated[int, typer.Option(help="Of a step.")] = 32,
) -> None:
    """Write what has to be measured of models and sizes of memory, the fastest first."""
    for name, size in itertools.product(model, memory):
        options = SHARED | {"model": name, "memory-limit": size}
        options |= {"batch-size": 16, "grad-accumulation": sequences // 16}
        base, chosen = make_config(options), preset(name)
        host = parse_size(host_memory)
        asked = MachineOptions(host_memory=host, card=card, card_file=card_file)
        where = target(base, chosen, asked, search=True)
        planner = where.planner(chosen)
        fit = Fit(base, planner, where.limits, frozenset({"gpus", "memory_limit"}))
        configs = list(grid(base, sequences))
        best, found = rivals(planner, fit, iter(configs), within)
        rows = [
            {"options": flags_of(c.config) | {"watchdog": 0}, "predicted": c.need.speed}
            for c in (best, *found)
        ]
        sweep = {"model": name, "memory": size, "within": within, "source": planner.card.source}
        sweep |= {"combinations": len(configs), "rows": rows}
        sweeps = _read(file) if file.exists() else []
        before = [s for s in sweeps if (s["model"], s["memory"]) == (name, size)]
        others = [s for s in sweeps if s not in before]
        keep_measured(rows, [row for s in before for row in s["rows"]], planner)
        _write(file, [*others, sweep])
        print(f"{name} in {size}: {len(found)} rivals of {len(configs)} combinations", flush=True)


def keep_measured(
    rows: list[dict[str, Any]], before: list[dict[str, Any]], planner: Planner
) -> None:
    """Give rows of a new plan what an older one's were measured to be. Those that it has no more
    follow at its end, with what is predicted of them now."""
    for old in before:
        if "measured" not in old:
            continue
        row = next((row for row in rows if row["options"] == old["options"]), None)
        if row is None:
            row = {"options": old["options"]}
            row["predicted"] = planner.exact(make_config(old["options"])).speed
            rows.append(row)
        row |= {name: value for name, value in old.items() if name not in row}


def _read(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["sweeps"]


def _write(file: Path, sweeps: list[dict[str, Any]]) -> None:
    write_file(file, json.dumps({"sweeps": sweeps}, indent=1) + "\n")


def speed(options: dict[str, Any]) -> dict[str, Any]:
    """The speed of one row: `measured` and `spread`, and `predicted_here` by the card file of this
    rig."""
    with open_trainer(options, 10_000) as trainer:
        batches = random_batches(trainer)
        trainer.step(batches)
        begun, steps, once = time.monotonic(), 1, math.inf
        while steps < WARM_UP or time.monotonic() - begun < SETTLE:
            once, _ = timed_steps(trainer, batches, 1)
            steps += 1
        count = max(1, round(TIMED / once))
        repeats = REPEATS if once < 2 * TIMED else LONG_REPEATS
        times = [timed_steps(trainer, batches, count)[0] for _ in range(repeats)]
        step = statistics.median(times)
        return {
            "measured": trainer.plan.tokens / step,
            "spread": (max(times) - min(times)) / step,
            "predicted_here": predicted_speed(trainer),
        }


def needs(row: dict[str, Any], sweep: dict[str, Any], sweeps: list[dict[str, Any]]) -> float:
    """Percent by which a row has to beat its prediction, more than any measured row of its model,
    to be CLAIM percent faster than what --fit finds; -inf where that is not measured."""
    own = sweep["rows"][0].get("measured")
    if own is None:
        return -math.inf
    rows = [r for s in sweeps if s["model"] == sweep["model"] for r in s["rows"]]
    most = max(r["measured"] / r["predicted"] for r in rows if "measured" in r)
    return 100 * ((1 + CLAIM / 100) * own / (row["predicted"] * most) - 1)


def _beaten(sweep: dict[str, Any]) -> bool:
    """Whether a row is CLAIM percent faster than what --fit finds, so that others tell no more."""
    own, *rest = (row.get("measured", 0.0) for row in sweep["rows"])
    return own > 0 and max(rest, default=0.0) > (1 + CLAIM / 100) * own


def _missing(sweep: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Its rows that neither were measured nor failed, and where they are in it."""
    rows = enumerate(sweep["rows"])
    return [(i, row) for i, row in rows if "measured" not in row and "error" not in row]


def next_row(
    sweeps: list[dict[str, Any]], enough: float = math.inf
) -> tuple[dict[str, Any], int] | None:
    """The sweep and the index of the row to measure next, None where no other has to be.

    enough: percent; a row that needs more does not have to be.
    """
    found = []
    for sweep in sweeps:
        for index, row in _missing(sweep):
            need = -math.inf if "again" in row else needs(row, sweep, sweeps)
            if need <= enough:
                # Rows that --fit finds and that have no answer come first, the models with short
                # steps before others.
                key = (_beaten(sweep), need, "again" not in row, index, -row["predicted"])
                found.append((key, sweep, index))
    return min(found, key=lambda item: item[0])[1:] if found else None


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="Of plan.")],
    seconds: Annotated[float, typer.Option(help="After which no row begins.")] = 300.0,
    enough: Annotated[
        float, typer.Option(help="Percent: rows that need more are left out.")
    ] = math.inf,
) -> None:
    """Measure the rows that are missing, what --fit finds first, then the likeliest to beat it."""
    start, fresh = time.monotonic(), True
    sweeps = _read(file)
    while time.monotonic() - start < seconds and (found := next_row(sweeps, enough)):
        sweep, index = found
        row = sweep["rows"][index]
        row["error" if fresh else "again"] = "it ended the process"  # unless it does not
        _write(file, sweeps)
        began, made = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        try:
            row |= speed(row["options"])
            row.pop("error", None)
        except LlmqError as error:
            if not fresh:
                print(f"{error}\nrun again: this row comes first in the next process")
                raise typer.Exit(1) from error
            row["error"] = " ".join(str(error).split())
        row.pop("again", None)
        row |= {"seconds": time.monotonic() - began, "date": made}
        fresh = False
        _write(file, sweeps)
        said = row.get("error") or f"{row['measured']:,.0f} of {row['predicted']:,.0f} predicted"
        where = f"{sweep['model']} in {sweep['memory']}, {index}"
        print(f"{where}: {said}, {row['seconds']:.1f} s", flush=True)


@app.command()
def table(file: Annotated[Path, typer.Argument(help="Of run.")]) -> None:
    """Print, for each model and memory, how far what --fit finds is from the fastest; all rows."""
    print(f"`tools/fit_sweep.py table {file}`: tokens/s\n")
    print("Others need: by how much any combination that was not measured would have to beat its")
    print("prediction, more than any measured row of the model beats its own, in order to be")
    print(f"{CLAIM:.0f} % faster than what --fit finds. What does all that a measured row does and")
    print("more is taken to be no faster than that.\n")
    print("| model | memory | measured rows | --fit's | the fastest | faster by | others need |")
    print("|" + " --- |" * 7)
    sweeps = _read(file)
    for sweep in sweeps:
        own, *_ = speeds = [row.get("measured", 0.0) for row in sweep["rows"]]
        made = f"{sum(map(bool, speeds))} of {len(speeds)}"
        most = f"{100 * (max(speeds) / own - 1):.1f} %" if own else ""
        least = {"predicted": sweep["rows"][0]["predicted"] * (1 - sweep["within"] / 100)}
        rest = [least, *(row for row in sweep["rows"] if "measured" not in row)]
        need = f"{min(needs(row, sweep, sweeps) for row in rest):.1f} %" if own else ""
        rates = [f"{speed:,.0f}" if speed else "" for speed in (own, max(speeds))]
        cells = (sweep["model"], sweep["memory"], made, *rates, most)
        print(f"| {' | '.join(cells)} | {need} |")
    for sweep in sweeps:
        print(f"\n## {sweep['model']} in {sweep['memory']}\n")
        print(f"Of {sweep['combinations']} combinations those predicted within {sweep['within']} %")
        print(f"of what --fit finds, which is the first ({sweep['source']}),")
        print("and what an earlier plan had measured.\n")
        print("| flags | measured | predicted |\n| --- | --- | --- |")
        for row in sweep["rows"]:
            flags = {k: v for k, v in row["options"].items() if k not in HIDDEN}
            words = " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in flags.items())
            measured = f"{row['measured']:,.0f}" if "measured" in row else row.get("error", "")
            print(f"| {words} | {measured} | {row['predicted']:,.0f} |")


if __name__ == "__main__":
    app()
