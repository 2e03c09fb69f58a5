"""The report of `llmq bench`, as Markdown for people and as CSV for spreadsheets."""

from collections.abc import Callable
from typing import Any

from llmq.base.dtypes import GIB
from llmq.bench.sweep_file import flag_of
from llmq.options.options_io import make_config
from llmq.report.tables import csv_table, markdown_table

SHOWN_WORDS = 12  # most lines of a failed run's output that the report shows

EXPLANATION = """\
Tokens are random. tok/s: median of the repeats, which on a GPU follow two seconds of steps, in
which its clock settles, and last a second at least; ±: their range over the median. tok/J: for a
joule of the GPUs alone. predicted: what `llmq plan` says, and what was measured in relation to it.
SOL: of the data sheet's peak, by llm.q's formula. TFLOP/s: of the model, recomputation not counted.
memory: in use on the whole GPU, and its ratio to the planned bytes (*: the arenas differ from the
plan). start: from the command to the end of the first step."""


# Column text for runs whose matrix products have another format than the model.
_PRODUCTS = {"e4m3": "fp8", "int8": "int8", "ternary": "ternary"}


def describe(options: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that tell runs apart, and the remaining options as `flags`, flag text by
    name."""
    config = make_config(options)
    columns = {
        "model": config.model.rsplit("/", 1)[-1],
        "dtype": _PRODUCTS.get(config.matmul_dtype, config.model_dtype),
        "batch": config.batch_size,
        "accumulation": config.grad_accumulation,
        "seq_len": config.seq_len,
        "gpus": max(config.gpus, 1),
    }
    left_out = {"model", "model-dtype", "batch-size", "grad-accumulation"}  # columns of their own
    left_out |= {"from-scratch", "device", "watchdog"}
    rest = {key: value for key, value in options.items() if key not in left_out}
    return columns | {"flags": {key: flag_of(key, value) for key, value in rest.items()}}


def title(run: dict[str, Any]) -> str:
    """Return a run in a few words, without its flags."""
    return f"{run['model']} {run['dtype']} {run['batch']} x {run['accumulation']}"


def shared_flags(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the flags that all runs have in common, by name."""
    flags = [run["flags"] for run in runs]
    return {k: v for k, v in flags[0].items() if all(f.get(k) == v for f in flags)}


def full_title(run: dict[str, Any], shared: dict[str, str]) -> str:
    """Return a run in a few words, with the flags that not all runs share."""
    return " ".join([title(run), *(v for k, v in run["flags"].items() if k not in shared)])


# ------------------------------------------------------------------------------------------------
# Markdown


def _over(run: dict[str, Any], other: float | None) -> str:
    """Return `other`, a speed in tokens per second, in thousands, and the run's speed as a multiple
    of `other`."""
    if other is None:
        return ""
    return f"{other / 1e3:.1f}k ({run['result']['tokens_per_second'] / other:.2f}x)"


def _memory(run: dict[str, Any]) -> str:
    memory = run["result"]["memory"]
    used, planned = memory["used"], memory["planned"]
    text = f"{planned / GIB:.2f}" if used is None else f"{used / GIB:.2f} ({used / planned:.3f}x)"
    return text + ("" if memory["as_planned"] else "*")


def _number(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    """Return a function that formats the number `name` of a run's result as a cell; None gives an
    empty cell."""

    def cell(run: dict[str, Any]) -> str:
        value = run["result"][name]
        return "" if value is None else form.format(value)

    return cell


def _energy(run: dict[str, Any]) -> str:
    """Return the tokens for a joule of the GPUs; "" if the GPUs do not count energy."""
    joules = run["result"]["joules_per_token"]
    return f"{1 / joules:,.1f}" if joules else ""


def _spread(run: dict[str, Any]) -> str:
    """Return the spread of the repeats; "" for a single repeat, which has no spread."""
    return _number("spread", "{:.1%}")(run) if len(run["result"]["step_seconds"]) > 1 else ""


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tok/s": _number("tokens_per_second", "{:,.0f}"),
    "tok/J": _energy,
    "±": _spread,
    "predicted": lambda run: _over(run, run["result"].get("predicted")),
    "SOL": _number("sol_percent", "{:.1f}%"),
    "TFLOP/s": _number("tflops", "{:.3g}"),
    "memory, GiB": _memory,
    "start, s": _number("first_step_seconds", "{:.1f}"),
}


def table_of(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the measured runs; columns without any text are left out."""
    runs = report["runs"]
    measured = [run for run in runs if run["status"] == "ok"]
    if not measured:
        return [], []
    shared = shared_flags(runs)
    several = len(report["invocations"]) > 1  # versions may differ between invocations
    cells = [
        {
            "model": run["model"],
            "dtype": run["dtype"],
            "batch": f"{run['batch']} x {run['accumulation']}",
            "flags": " ".join(v for k, v in run["flags"].items() if k not in shared),
            "made by": str(run["invocation"] + 1) if several else "",
            **{name: cell(run) for name, cell in _COLUMNS.items()},
        }
        for run in measured
    ]
    names = [name for name in cells[0] if any(row[name] for row in cells)]
    return names, [[row[name] for name in names] for row in cells]


def markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown. Flags that all runs share stand above the table."""
    runs = report["runs"]
    if not runs:
        return f"{_heading(report)}\n\n{_left(report)}\n"
    shared = shared_flags(runs)
    table = markdown_table(*table_of(report))
    blocks = [
        _heading(report),
        f"All runs: {' '.join(shared.values())}" if shared else "",
        table,
        "\n".join(_note(run, shared) for run in runs if run["status"] != "ok"),
        _left(report),
        EXPLANATION if table else "",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _note(run: dict[str, Any], shared: dict[str, str]) -> str:
    """Return a list item with the reason why a run has no speed, and the last lines of the run's
    output."""
    lines = [f"- {full_title(run, shared)}: {run['status']}: {run['message']}"]
    if words := _last_words(run):
        lines += ["", "  ```text", *(f"  {word}" for word in words), "  ```", ""]
    return "\n".join(lines)


def _last_words(run: dict[str, Any]) -> list[str]:
    """Return the last output lines of a run. After a hang, return the innermost calls of the last
    stack, which come first in the stack and show where the run hung."""
    words = run.get("last_words", [])
    stacks = [at for at, word in enumerate(words) if word.endswith("(most recent call first):")]
    return words[stacks[-1] :][:SHOWN_WORDS] if stacks else words[-SHOWN_WORDS:]


def _left(report: dict[str, Any]) -> str:
    left = report.get("left", 0)
    runs = "1 run is" if left == 1 else f"{left} runs are"
    return f"{runs} still to be made: `llmq bench --resume` goes on." if left else ""


def _heading(report: dict[str, Any]) -> str:
    machine = report["machine"]
    machines = [i.get("machine") or machine for i in report["invocations"]]
    versions = [_versions(m) for m in machines]
    differ = len(set(versions)) > 1
    lines = [
        f"`{i['command']}`, {i['date']}, {i['repeats']} x {i['steps']} steps"
        + " or more" * bool((made_on or {}).get("gpu"))  # `settle` adds steps
        + (f", {version}" if differ else "")
        for i, made_on, version in zip(report["invocations"], machines, versions, strict=True)
    ]
    if len(lines) > 1:
        lines = [f"{number}. {line}" for number, line in enumerate(lines, 1)] + [""]
    if machine is not None:
        driver = (machine["gpu"] or {}).get("driver")  # empty without NVML
        device = machine["device"] + (f", driver {driver}" if driver else "")
        lines.insert(0, f"# {device}\n")
        lines += [] if differ else [_versions(machine)]
    return "\n".join(lines).rstrip("\n")


def _versions(machine: dict[str, Any] | None) -> str:
    if machine is None:
        return ""
    return "; ".join(f"{name} {value}" for name, value in machine["versions"].items())


# ------------------------------------------------------------------------------------------------
# CSV


def as_csv(report: dict[str, Any]) -> str:
    """Return the report as CSV, a line for each run: every option that any run has, then the
    outcome.

    Speeds are in tokens per second, memory in bytes. The column step_seconds holds the repeats,
    separated by blanks.
    """
    runs = report["runs"]
    options = list(dict.fromkeys(key for run in runs for key in run["options"]))
    lines = []
    for run in runs:
        line = {key: run["options"].get(key) for key in options} | {"status": run["status"]}
        lines.append(line | _csv_numbers(run.get("result")) | {"message": run.get("message")})
    return csv_table(list(lines[0]) if lines else [], (line.values() for line in lines))


_NUMBERS = (
    "tokens_per_second spread predicted sol_percent tflops joules_per_token first_step_seconds loss"
).split()


def _csv_numbers(result: dict[str, Any] | None) -> dict[str, Any]:
    result = result or {}
    memory = result.get("memory", {})
    return {
        **{name: result.get(name) for name in _NUMBERS},
        "step_seconds": " ".join(map(repr, result.get("step_seconds", []))),
        "memory_planned": memory.get("planned"),
        "memory_used": memory.get("used"),
    }
