"""`llmq bench`: the speed of one or many configurations, as a Markdown table and as JSON.

Every configuration runs in a child process (llmq/bench/measure.py); this one loads no CUDA.
"""

from __future__ import annotations

import itertools
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import check_writable, disk_errors, write_file
from llmq.bench.child import run_watched
from llmq.bench.peers import floor_of, peers_of, read_facts
from llmq.config.option_file import read_option_file
from llmq.config.option_types import AUTO
from llmq.config.options import OPTIONS, TrainConfig
from llmq.config.options_io import make_config

GIB = 1 << 30
CHILD = (sys.executable, "-m", "llmq.bench.measure")
START_SECONDS = 60  # of a child, beside --watchdog: several ranks watch themselves from then on
_FIRST_FLAG = {flag: opt.flags[0] for opt in OPTIONS.values() for flag in opt.flags}
_DATA = "train_file eval_file eval_fraction train_seed eval_seed steps epochs eval_every_n_steps "
_DATA += "eval_num_steps document_separator"
# Options that change nothing here: which data there is, what is written when, what is timed beside.
_WITHOUT_EFFECT = {
    opt.flags[0]
    for name, opt in OPTIONS.items()
    if opt.group in {OPTIONS[n].group for n in ("log_file", "eval_task", "guard")}
    or name in (*_DATA.split(), "measure_scaling")
}

EXPLANATION = """\
Tokens are random. tok/s: median of the repeats; ±: their range over the median. SOL: of the data
sheet's peak, by llm.q's formula. TFLOP/s: of the model, recomputation not counted. memory: in use
on the whole GPU, and its ratio to the planned bytes (*: the arenas differ from the plan). idle: 1 -
(the launches of a step's main stream, timed one by one, added up) / (a step). Python: time in which
the host, driver included, enqueues a step into an empty queue, of a step. waits: of the host for
the GPU within a step. start: from the command to the end of the first step."""

# ------------------------------------------------------------------------------------------------
# Configurations


def read_runs(given: dict[str, Any], file: Path | None) -> list[dict[str, Any]]:
    """The options of every run, by flag name without dashes.

    given: from the command line; wins. file: YAML or JSON with options of all runs, and under
    `runs` a list of mappings with those of each. A list as a value stands for one run with each
    of its elements. Raises ConfigError.
    """
    shared = {} if file is None else read_option_file(file)
    runs = shared.pop("runs", [{}])
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise ConfigError(f"--config: {file}: runs must be a list of mappings of options")
    expanded = []
    for run in runs:
        options = {"from-scratch": True} | _by_flag(shared) | _by_flag(run) | given
        choices = [
            [(key, value) for value in (values if isinstance(values, list) else [values])]
            for key, values in options.items()
        ]
        expanded += [dict(choice) for choice in itertools.product(*choices)]
    if not expanded:
        raise ConfigError(f"--config: {file} has an empty list, so there is nothing to run")
    for options in expanded:
        for key in options:
            if key in _WITHOUT_EFFECT:
                raise ConfigError(f"--{key}: has no effect on a benchmark, leave it out")
        if make_config(options).vocab_size == AUTO:  # which brings up what is wrong, too
            raise ConfigError("--vocab-size: auto needs token files, and tokens are random here")
    return expanded


def one_run(given: dict[str, Any], file: Path | None) -> TrainConfig:
    """The only run of these options, as for read_runs. ConfigError if there are several."""
    runs = read_runs(given, file)
    if len(runs) > 1:
        raise ConfigError(f"--save-config: holds the options of one run, but these are {len(runs)}")
    return make_config(runs[0])


def _by_flag(options: dict[str, Any]) -> dict[str, Any]:
    """The same options under each one's first flag; unknown ones are left to make_config."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        flag = str(key).replace("_", "-")
        flag = _FIRST_FLAG.get(flag, flag)
        if flag in found:
            raise ConfigError(f"--config: {flag} is given twice, under two names")
        found[flag] = value
    return found


# What runs are called whose products are not in the format of the model.
_PRODUCTS = {"e4m3": "fp8", "int8": "int8"}


def describe(options: dict[str, Any]) -> dict[str, Any]:
    """What a run is told apart by, and its remaining options as flags."""
    config = make_config(options)
    columns = {
        "model": config.model.rsplit("/", 1)[-1],
        "dtype": _PRODUCTS.get(config.matmul_dtype, config.model_dtype),
        "fp8_head": config.head_dtype == "e4m3",
        "batch": config.batch_size,
        "accumulation": config.grad_accumulation,
        "seq_len": config.seq_len,
        "gpus": max(config.gpus, 1),
    }
    left_out = {"model", "model-dtype", "batch-size", "grad-accumulation"}  # columns
    left_out |= {"from-scratch", "device", "watchdog"}
    rest = {key: value for key, value in options.items() if key not in left_out}
    return columns | {"flags": {key: _flag(key, value) for key, value in rest.items()}}


def _flag(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{key}" if value else f"--no-{key}"
    return f"--{key}={value}"


# ------------------------------------------------------------------------------------------------
# Running


def run_child(options: dict[str, Any], steps: int, repeats: int) -> dict[str, Any]:
    """What one child measured: `status` and the rest as llmq/bench/measure.py writes it."""
    watchdog = make_config(options).watchdog
    limit = watchdog + START_SECONDS if watchdog else 0
    with tempfile.TemporaryDirectory(prefix="llmq-bench-") as folder:
        path, alive = Path(folder) / "result.json", Path(folder) / "alive"
        job = {"options": options, "steps": steps, "repeats": repeats, "started": time.time()}
        command = [*CHILD, str(path), str(alive)]
        # Whatever a library prints goes to standard error, where our progress is.
        status = run_watched(command, json.dumps(job), alive, limit)
        if path.exists():
            return json.loads(path.read_text())
    message = f"the process ended with status {status}"
    if status is None:
        message = (
            f"no progress for {limit} seconds, so the process was ended; standard error says where "
            "it was; raise --watchdog if this is not a hang, 0 switches it off"
        )
    elif status == -signal.SIGKILL:
        message = "the process was killed, as the system does when host memory runs out"
    return {"status": "failed", "message": message}


def run_bench(
    given: dict[str, Any],
    file: Path | None,
    *,
    out: Path,
    peers: Path | None,
    steps: int,
    repeats: int,
    add: bool,
    argv: list[str],
) -> None:
    """Measure every configuration, write `out`.md and `out`.json, and print the table.

    given, file: as for read_runs. peers: JSON with `runs` of other programs and `floors`. steps:
    timed in each of the repeats. add: to what the files hold already. They are written after every
    run. Raises LlmqError at the end if a run failed; one that does not fit into memory is noted and
    left out.
    """
    runs = read_runs(given, file)
    facts = {"runs": [], "floors": []} if peers is None else read_facts(peers)
    json_file = out.with_name(out.name + ".json")
    earlier = _read_report(json_file) if add and json_file.exists() else None
    check_writable("--out", out.parent)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    invocation = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["llmq", *argv[1:]]),
        "steps": steps,
        "repeats": repeats,
    }
    new: dict[str, Any] = {"machine": None, "invocations": [invocation], "runs": []}
    for index, options in enumerate(runs, 1):
        run = describe(options) | {"options": options}
        print(f"[{index}/{len(runs)}] {_title(run)} ...", file=sys.stderr, flush=True)
        outcome = run_child(options, steps, repeats)
        new["machine"] = outcome.pop("machine", None) or new["machine"]
        device = (new["machine"] or {}).get("device")
        run |= outcome  # and with it how many GPUs there were
        if run["gpus"] > 1:
            run["flags"].setdefault("gpus", _flag("gpus", run["gpus"]))
        run |= {"peers": peers_of(facts, device, run), "floor": floor_of(facts, device, run)}
        new["runs"].append(run | {"invocation": 0})
        report = new if earlier is None else merge(earlier, new)
        said = run.get("message") or f"{run['result']['tokens_per_second']:,.0f} tok/s"
        print(f"  {run['status']}: {said}", file=sys.stderr, flush=True)
        write_file(json_file, json.dumps(report, indent=1) + "\n")
        write_file(out.with_name(out.name + ".md"), markdown(report))
    print(markdown(report))
    failed = sum(run["status"] == "failed" for run in new["runs"])
    if failed:
        raise LlmqError(f"{failed} of {len(runs)} runs failed, {out}.md says why")


def _read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return {key: report[key] for key in ("machine", "invocations", "runs")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--add: {path} is not a report of llmq bench ({error!r})") from None


def merge(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The runs of both reports, of equal ones the later, but a measured one before a failed one.

    Raises ConfigError unless they were measured on the same kind of machine with the same versions.
    """
    machines = [m for m in (earlier["machine"], later["machine"]) if m is not None]
    kinds = [[m["device"], (m["gpu"] or {}).get("driver"), m["versions"]] for m in machines]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ConfigError(
            f"--add: measured on {kinds[0]}, and now on {kinds[1]}: use another --out"
        )

    def config(run: dict[str, Any]) -> TrainConfig:  # without the log's name, made from the time
        return replace(make_config(run["options"]), log_file=None)

    again = [config(run) for run in later["runs"]]
    measured = [config(run) for run in later["runs"] if run["status"] == "ok"]
    first = len(earlier["invocations"])
    runs = [
        run
        for run in earlier["runs"]
        if config(run) not in (measured if run["status"] == "ok" else again)
    ]
    runs += [run | {"invocation": run["invocation"] + first} for run in later["runs"]]
    invocations = earlier["invocations"] + later["invocations"]
    used = sorted({run["invocation"] for run in runs})
    return {
        "machine": machines[-1] if machines else None,
        "invocations": [invocations[index] for index in used],
        "runs": [run | {"invocation": used.index(run["invocation"])} for run in runs],
    }


# ------------------------------------------------------------------------------------------------
# The table


def _title(run: dict[str, Any]) -> str:
    return f"{run['model']} {run['dtype']} {run['batch']} x {run['accumulation']}"


def _over(run: dict[str, Any], other: float | None) -> str:
    """Another speed, and ours in relation to it."""
    if other is None:
        return ""
    return f"{other / 1e3:.1f}k ({run['result']['tokens_per_second'] / other:.2f}x)"


def _memory(run: dict[str, Any]) -> str:
    memory = run["result"]["memory"]
    used, planned = memory["used"], memory["planned"]
    text = f"{planned / GIB:.2f}" if used is None else f"{used / GIB:.2f} ({used / planned:.3f}x)"
    return text + ("" if memory["as_planned"] else "*")


def _number(name: str, form: str, scale: int = 1) -> Callable[[dict[str, Any]], str]:
    """The cell of a number of the result, times scale; empty where it is not known."""

    def cell(run: dict[str, Any]) -> str:
        value = run["result"][name]
        return "" if value is None else form.format(scale * value)

    return cell


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tok/s": _number("tokens_per_second", "{:,.0f}"),
    "±": _number("spread", "{:.1%}"),
    "SOL": _number("sol_percent", "{:.1f}%"),
    "TFLOP/s": _number("tflops", "{:.3g}"),
    "of floor": lambda run: _over(run, run["floor"]),
    "memory, GiB": _memory,
    "mJ/token": _number("joules_per_token", "{:.2f}", 1000),
    "idle": _number("kernel_idle", "{:.1%}"),
    "Python": _number("python_busy", "{:.1%}"),
    "waits": _number("waits_per_step", "{}"),
    "start, s": _number("first_step_seconds", "{:.1f}"),
}


def markdown(report: dict[str, Any]) -> str:
    """The report for people. Flags that all runs share stand above the table."""
    runs = report["runs"]
    flags = [run["flags"] for run in runs]
    shared = {k: v for k, v in flags[0].items() if all(f.get(k) == v for f in flags)}
    systems = list(dict.fromkeys(name for run in runs for name in run["peers"]))
    measured = [run for run in runs if run["status"] == "ok"]
    cells = [
        {
            "model": run["model"],
            "dtype": run["dtype"],
            "batch": f"{run['batch']} x {run['accumulation']}",
            "flags": " ".join(v for k, v in run["flags"].items() if k not in shared),
            **{name: cell(run) for name, cell in _COLUMNS.items()},
            **{name: _over(run, run["peers"].get(name)) for name in systems},
        }
        for run in measured
    ]
    names = [n for n in (cells[0] if cells else []) if any(row[n] for row in cells)]
    rows = [names, ["---"] * len(names), *([row[name] for name in names] for row in cells)]
    table = ["| " + " | ".join(row) + " |" for row in rows] if cells else []
    notes = [
        f"- {_title(run)}: {run['status']}: {run['message']}"
        for run in runs
        if run["status"] != "ok"
    ]
    blocks = [
        _heading(report),
        f"All runs: {' '.join(shared.values())}" if shared else "",
        "\n".join(table),
        "\n".join(notes),
        EXPLANATION if cells else "",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _heading(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"`{i['command']}`, {i['date']}, {i['repeats']} x {i['steps']} steps"
        for i in report["invocations"]
    ]
    if len(lines) > 1:
        lines = [f"- {line}" for line in lines] + [""]
    if machine is not None:
        driver = (machine["gpu"] or {}).get("driver")  # "" without NVML
        device = machine["device"] + (f", driver {driver}" if driver else "")
        lines.insert(0, f"# {device}\n")
        lines.append("; ".join(f"{name} {value}" for name, value in machine["versions"].items()))
    return "\n".join(lines)
