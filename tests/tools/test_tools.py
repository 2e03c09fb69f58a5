"""The tools, on the CPU device and with stand-ins for what needs a GPU."""

import importlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from llmq.base.result import Result
from llmq.options.card_file import record_of
from llmq.runtime.device import FUSED, Device
from llmq.runtime.machine import choose_machine
from llmq.runtime.timing import LaunchTime
from tests.kept import kept
from tests.rigs import card_file
from tests.runs import make_workplace
from tools.op_calls import KINDS

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    """tool(name) imports tools/<name>.py as running it would."""
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module


# -- bench_ops -----------------------------------------------------------------------------------


def smallest(cases):
    """Name of the case that has the fewest elements."""

    def size(name):
        product = 1
        for number in cases[name]:
            product *= max(int(number), 1)
        return product

    return min(cases, key=size)


def operations():
    stems = {path.stem for path in (TOOLS.parent / "llmq" / "ops").rglob("*.py")}
    no_single = {"__init__", "common", "product", "routes", "matmul_fused"}
    return sorted(stems - no_single | {*KINDS, *FUSED})


def test_every_operation_has_calls(tool):
    assert sorted(tool("op_calls").OPS) == operations()


@pytest.mark.parametrize("op", operations())
def test_every_call_runs(tool, op):
    bench_ops, shapes = tool("bench_ops"), tool("op_calls").cases(op)
    machine, case = choose_machine("cpu", 1), smallest(shapes)
    limits = bench_ops.Ceilings(copy=1e9, product=1e12, facts={})
    records = list(bench_ops.measured(machine.open, machine.spec, op, case, limits, 1024, 0.0))
    calls = tool("op_calls").OPS[op](*shapes[case])
    assert [record["call"] for record in records] == [call.name for call in calls]
    for record in records:
        assert "error" not in record
        assert (record["op"], record["case"]) == (op, case)
        assert record["us"] > 0 and record["bytes"] > 0
        bound = {
            "attention": 1e12,
            "attention_backward": 1e12,
            "grouped": 1e12,
            "matmul": 1e12,
            "matmul_fp8": 2e12,
            "matmul_int8": 2e12,
        }
        if op in FUSED:
            bound[op] = 2e12 if record["call"].startswith("fp8") else 1e12
        bound = bound.get(op, 1e9)
        work = record["bytes"] if bound == 1e9 else record["flops"]
        assert record["percent"] == pytest.approx(100 * work / (record["us"] / 1e6) / bound)
        assert record["op"] in bench_ops.line(record)


def test_bench_ops_command(tool, tmp_path, capsys):
    bench_ops, path = tool("bench_ops"), tmp_path / "ops.json"
    bench_ops.main("bias", "one_vector", "cpu", path, seconds=0.0)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("CPU: copy ")
    assert out[2].split()[:3] == ["bias", "backward", "one_vector"]
    assert out[3].startswith("below 85 % of a copy: bias backward one_vector ")
    assert [record["call"] for record in json.loads(path.read_text())] == ["backward"]
    with pytest.raises(SystemExit, match="fly is not an operation"):
        bench_ops.main("fly", None, "cpu", None)


# -- profile_step and its like -------------------------------------------------------------------


def test_breakdown(tool):
    launches = [
        LaunchTime("a", 1.0, 2_000_000, 0, True),
        LaunchTime("b", 6.0, 0, 12_000_000_000, True),
        LaunchTime("a", 1.0, 2_000_000, 0, True),
        LaunchTime("c", 0.0, 5, 0, True),
    ]
    lines = [line.split() for line in tool("profile_step").breakdown(launches)]
    assert lines[1:] == [
        ["b", "1", "6.000", "75.0%", "0", "2"],
        ["a", "2", "2.000", "25.0%", "2", "0"],
        ["c", "1", "0.000", "0.0%", "0", "0"],
        ["all", "4", "8.000"],
    ]


class BusyGpu:
    """Takes 0.2 s for what is enqueued; a further graph before its end blocks in the driver."""

    kind, sync_calls = "cuda", 0
    instead = Device.instead

    def __init__(self):
        self.free_at = time.perf_counter()

    def synchronize(self):
        self.sync_calls += 1
        time.sleep(max(self.free_at - time.perf_counter(), 0))

    def graph(self, key, fn):
        time.sleep(max(self.free_at - time.perf_counter(), 0))
        time.sleep(0.01)  # the host's work
        self.free_at = time.perf_counter() + 0.2


class StepOf:
    """A step of three graphs, which waits for its results by itself."""

    def __init__(self, dev):
        self.dev = dev

    def train(self, batches):
        for _ in batches:
            self.dev.graph(("micro_step",), None)
        self.dev.synchronize()
        time.sleep(0.05)
        return 7


def test_host_work_is_what_enqueueing_takes_without_waits(tool):
    dev = BusyGpu()
    step = StepOf(dev)
    trainer = SimpleNamespace(
        dev=dev,
        ranks=SimpleNamespace(first=SimpleNamespace(step=step)),
        enqueue_step=lambda batches: step.train(batches),
        result=lambda ticket: time.sleep(0.3) if ticket == 7 else None,
    )
    seconds, waits = tool("profile_step").host_work(trainer, [1, 2, 3])
    # The step's own wait of 0.2 s is a part of it; those between the micro-steps are not.
    assert 0.27 <= seconds < 0.4
    assert waits == 1
    assert "graph" not in vars(dev) and "train" not in vars(step)


def test_profile_step(tool):
    flags = "--model tiny --device cpu --model-dtype fp32 --batch-size 1 --seq-len 16"
    flags += " --grad-accumulation 1 --timed 1"
    result = CliRunner().invoke(tool("profile_step").app, flags.split())
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert " tok/s, " in lines[0]
    assert any(line.startswith("adamw ") for line in lines)
    assert lines[-1].startswith("step with graphs, less these: ")


def test_decode_speed(tool, capsys):
    speed = tool("decode_speed")
    speed.main(texts="1,3", device="cpu", kv_dtype="e4m3", prompt=3, new=4, repeats=1, prompts=8)
    title, rate, _, _, _, *rows, _, far, _, prompts = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"prompts of 8: [0-9,]+ tokens/s, [0-9.]+ x forward's [0-9,]+", prompts)
    form = "matrices in bf16, 3 + 4 tokens, keys and values in e4m3"
    assert title.endswith(f", CPU, tiny, {form}")
    assert 0 <= float(far.removeprefix("mean |difference| of log-probabilities with e4m3: ")) < 0.1
    assert rate.startswith("copies ")
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 3"]


def test_generate_beside(tool, capsys, monkeypatch):
    beside = tool("generate_beside")
    monkeypatch.setattr(beside, "apart", lambda side, job: side(job))
    how = {"model_dtype": "fp32", "prompt": 5, "new": 3, "warm_ups": 0, "repeats": 1}
    beside.main("tiny-llama", "1,2", "cpu", compiled="none", **how)
    versions, title, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert versions.startswith("transformers ") and title.startswith("tiny-llama, fp32, 5 + 3 tok")
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 2"]
    assert all(row.endswith("| 100% |") for row in rows)


def test_rl_sums(tool, capsys, monkeypatch):
    sums = tool("rl_sums")
    learned, held = sums.sums(2)
    assert len(learned) + len(held) == 7290 + sums.HELD_OUT and not {*learned} & {*held}
    assert sums.score(["42", "x"], {"answer": "42"}) == [1, 0]
    monkeypatch.setattr(sums, "LEAST", 0.0)
    monkeypatch.setattr(sums, "STEPS", 2)
    how = {"goal": 2.0, "lr": 1e-3, "prompts": 8, "samples": 4, "updates": 2}
    sums.main(digits=1, minutes=1e-5, layers=1, width=32, device="cpu", **how)
    *_, tuned, rewards, _, last = capsys.readouterr().out.splitlines()
    assert tuned.startswith("| tuned | 2 |") and rewards.startswith("| rewards | 2 |")
    assert last.startswith("from ") and last.endswith(" minutes")


def test_route_turns_times_steps_with_a_route_and_without(tool):
    """The route is left out in its own turns alone, and one that there is not is refused."""
    flags = "--model tiny --device cpu --model-dtype fp32 --batch-size 1 --seq-len 16 "
    flags += "--grad-accumulation 1 --turns 1 --seconds 0 --without "
    module = tool("route_turns")
    routes, seen = dict(module.ROUTES), set()
    timed = module.timed_steps

    def watched(*args):
        seen.add(frozenset(routes) - frozenset(module.ROUTES))
        return timed(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "timed_steps", watched)
        result = CliRunner().invoke(module.app, (flags + "glu,gradient").split())
    assert result.exit_code == 0, result.output
    assert seen == {frozenset(), frozenset({"glu"}), frozenset({"gradient"})}
    assert routes == module.ROUTES
    ways = [line.split(":")[0] for line in result.output.splitlines()[-3:]]
    assert ways == ["all routes", "without glu", "without gradient"]
    result = CliRunner().invoke(module.app, (flags + "glue").split())
    assert "no route is 'glue'" in str(result.exception)


def test_rate_sweep_compares_ways_at_their_best_rates_and_goes_on(tool, tmp_path, monkeypatch):
    """Runs of a report that is there are not made again, and a way's runs differ in rates alone."""
    monkeypatch.chdir(make_workplace(tmp_path))
    Path("data/eval.bin").rename("data/eval-0.bin")
    shared = "from-scratch: true\nmodel: model\ndevice: cpu\nmodel-dtype: fp32\nbatch-size: 2\n"
    shared += "seq-len: 16\ngrad-accumulation: 1\nlearning-rate: [1.0e-2, 1.0e-3]\n"
    ways = "[{optimizer: adamw}, {optimizer: muon}, {optimizer: normuon}]"
    Path("sweep.yaml").write_text(f"{shared}runs: {ways}\n")
    flags = "sweep.yaml --data data --steps 8 --share 0.5 --out of/sweep".split()
    result = CliRunner().invoke(tool("rate_sweep").app, [*flags, "--minutes", "1e-9"])
    assert "too few to begin a run" in str(result.exception)
    for made in (6, 0):
        result = CliRunner().invoke(tool("rate_sweep").app, flags)
        assert result.exit_code == 0, result.output
        assert result.output.count("parameters,") == made
    runs = json.loads(Path("of/sweep.json").read_text())["runs"]
    steps = [(r["optimizer"], r["learning_rate"], r["options"]["steps"]) for r in runs]
    of_muon = [("muon", 0.01, 4), ("muon", 0.001, 4)]
    assert steps == [
        ("adamw", 0.01, 8),
        ("adamw", 0.001, 8),
        *of_muon,
        ("normuon", 0.01, 4),
        ("normuon", 0.001, 4),
    ]
    assert len({run["log"] for run in runs}) == 6
    text = Path("of/sweep.md").read_text()
    assert "in 50% of its tokens" in text and "The best rate of" in text
    assert Path("of/sweep.png").stat().st_size > 10_000
    for run, (*_, length) in zip(runs, steps, strict=True):
        *course, end = json.loads((Path("of/sweep") / run["log"]).read_text())
        assert [r["step"] for r in course] == [*range(length)] and end["loss"] == run["loss"]
        # The same first weights and data, whatever was made before.
        first = json.loads((Path("of/sweep") / runs[0]["log"]).read_text())[0]
        assert course[0]["loss"] == first["loss"]


# -- gpu_check.sh --------------------------------------------------------------------------------


@pytest.fixture
def gpu_check(tmp_path):
    """gpu_check(*parts) runs the script with an interpreter that only says what it was given."""
    interpreter = tmp_path / "python"
    interpreter.write_text(
        '#!/bin/sh\necho "$@" >> "$CALLS"\n'
        'case $2 in pytest) echo "3 passed in 1 s"; exit 3;; esac\n'
        'echo "below 85 % of a copy: none"\necho "  ok: 5 tok/s"\n'
    )
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    calls = tmp_path / "calls"
    calls.touch()

    def run(*parts):
        environment = os.environ | {"PYTHON": str(interpreter), "CALLS": str(calls)}
        command = ["bash", str(TOOLS / "gpu_check.sh"), str(tmp_path / "logs"), *parts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done, calls.read_text().splitlines()

    return run


def test_gpu_check_runs_everything_and_counts_failures(gpu_check, tmp_path):
    done, calls = gpu_check()
    logs = tmp_path / "logs"
    assert [call.split()[:2] for call in calls] == [
        ["-m", "pytest"],
        ["tools/bench_ops.py", "all"],
        ["-m", "llmq"],
        ["tools/profile_step.py", "--device"],
    ]
    assert f"--out {logs}/bench" in calls[2] and f"--json {logs}/ops.json" in calls[1]
    assert done.returncode == 1
    table = [line.split(maxsplit=3) for line in done.stdout.splitlines()[-5:]]
    assert [row[:2] for row in table] == [
        ["part", "status"],
        ["tests", "3"],
        ["ops", "0"],
        ["bench", "0"],
        ["profile", "0"],
    ]
    assert [row[3] for row in table[1:4]] == [
        "3 passed in 1 s",
        "below 85 % of a copy: none",
        "ok: 5 tok/s",
    ]
    assert (logs / "tests.log").read_text() == "3 passed in 1 s\n"


def test_gpu_check_takes_parts_with_values(gpu_check):
    done, calls = gpu_check("ops=rope", "profile=tiny", "bench=my.yaml")
    assert done.returncode == 0
    assert calls[0].startswith("tools/bench_ops.py rope ")
    assert "--model tiny " in calls[1]
    assert "--config my.yaml " in calls[2]


# -- sanitize.sh ---------------------------------------------------------------------------------


@pytest.fixture
def sanitize(tmp_path):
    """sanitize(*arguments) runs the script with stand-ins: 7 tests, racecheck finds an error."""
    (tmp_path / "bin").mkdir()
    python, sanitizer = tmp_path / "bin" / "python", tmp_path / "bin" / "compute-sanitizer"
    python.write_text(
        '#!/bin/sh\necho "$@" >> "$CALLS"\nfor i in 1 2 3 4 5 6 7; do echo "t.py::t[$i b]"; done\n'
    )
    sanitizer.write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n[ "$2" = memcheck ] || exit 9\n')
    calls = tmp_path / "calls"
    for file in (python, sanitizer):
        file.chmod(0o755)

    def run(*arguments):
        calls.write_text("")
        path = f"{python.parent}:{os.environ['PATH']}"
        environment = os.environ | {"PYTHON": str(python), "CALLS": str(calls), "PATH": path}
        command = ["bash", str(TOOLS / "sanitize.sh"), str(tmp_path / "logs"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done, calls.read_text().splitlines()

    return run


def test_sanitize_runs_every_test_in_one_part(sanitize, tmp_path):
    chosen = []
    for part in (1, 2, 3):
        done, calls = sanitize("--select", f"{part}/3")
        assert done.returncode == 1  # racecheck found something
        listed = tmp_path / "logs" / f"{part}-of-3.tests"
        chosen += listed.read_text().splitlines()
        assert calls[0].endswith("--collect-only tests/ops")
        assert [call.split()[1] for call in calls[1:]] == ["memcheck", "racecheck"]
        assert all(call.endswith(f"@{listed}") for call in calls[1:])
    assert chosen == [f"t.py::t[{i} b]" for i in range(1, 8)]
    done, calls = sanitize("tests/ops/attention/test_rope.py", "-k", "cuda")
    assert calls[0].endswith("--collect-only tests/ops/attention/test_rope.py -k cuda")
    assert "tests 1-7 of 7" in done.stdout
    assert "racecheck: exit 9" in done.stdout


def test_predictions_stand_beside_what_was_measured(tool, capsys, tmp_path):
    report = json.loads(kept("h100_recipes.json").read_text())
    first = report["runs"][0]["invocation"]
    runs = [run for run in report["runs"] if run["invocation"] == first][-2:]  # of one day
    (tmp_path / "some.json").write_text(json.dumps(report | {"runs": runs}))
    (tmp_path / "rig.json").write_text(json.dumps(record_of(card_file())))

    def printed(rig, since=""):
        tool("predicted").main([tmp_path / "some.json"], rig, since=since)
        return capsys.readouterr().out

    rows = [line.strip("| ").split(" | ") for line in printed(None).splitlines()]
    measured, guess = (float(cell.replace(",", "")) for cell in rows[-1][3:5])
    assert rows[-1][0] == runs[-1]["model"]
    assert measured == round(runs[-1]["result"]["tokens_per_second"])
    assert 0.8 < guess / measured < 1.2
    # By a card file, beside the same by the data sheet; and how many of them are close.
    *lines, _, last = printed(tmp_path / "rig.json").splitlines()
    cells = lines[-1].strip("| ").split(" | ")
    kind, same_size = (int(cell.removesuffix(" %")) for cell in cells[8:])
    assert cells[6:8] == rows[-1][4:] and 0 <= same_size <= kind < 100
    assert last.startswith("rates measured on this rig") and "of 2 within 5 %" in last
    day = report["invocations"][runs[-1]["invocation"]]["date"][:10]
    told = [printed(None, since).splitlines() for since in (day, f"{day} 24", "")]
    assert told[0][2:] == told[2][2:] and len(told[1]) == len(told[0]) - 2


# -- fingerprint ---------------------------------------------------------------------------------


def fingerprint(*arguments):
    command = [sys.executable, str(TOOLS / "fingerprint.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(TOOLS.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_fingerprint_tells_what_has_changed(tmp_path, tool, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    run = "train qwen2 delayed"
    status, out, err = fingerprint("--out", new, "--only", "n qwen2 delayed$", "--jobs", 1)
    assert (status, err) == (0, "") and f"1 runs of {TOOLS.parent / 'llmq'} in " in out
    shutil.copy(new, old)
    assert fingerprint("--compare", old, new) == (0, "1 runs are identical\n", "")
    found = json.loads(old.read_text())
    assert found[run]["run"]["used"] and found[run]["files"]["out/model.safetensors"]
    result, memory = found[run]["run"]["steps"][2], found[run]["run"]["memory"]["device"]
    memory["Stack"] += 16
    stack = f"run.memory.device.Stack: {memory['Stack']} -> {memory['Stack'] - 16}"
    compare, then = tool("fingerprint_compare").compare, json.loads(new.read_text())
    assert compare(found, then) == 1
    assert capsys.readouterr().out == (
        "Fewer planned bytes (1):\n  1 run: run.memory.device.Stack\n"
        f"    {run}: {stack}\n0 runs are identical, 1 are not\n"
    )
    result["loss"] = 1.25
    assert compare(found, then) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Different (1):",
        "  1 run: run.memory.device.Stack, run.steps.*.loss",
        f"    {run}: {stack} and 1 more",
        "0 runs are identical, 1 are not",
    ]
    assert fingerprint("--out", old, "--only", "bloom")[0] == 2


RECORD = {
    "train a": {"steps": [{"loss": 1.0}, {"loss": float("nan")}], "sizes": {"x_bytes": 8}},
    "train b": {"steps": [{"loss": 2.0}], "files": {}, "warnings": []},
    "command c": {"out": "x"},
}
CHANGES = {  # of the new record, and what the comparison says of it
    "nothing": ({}, None),
    "a loss": ({"train b": {"steps": [{"loss": 2.0000000000000004}]}}, "Different (1)"),
    "a number that was not one": ({"train a": {"steps": [{"loss": 1.0}, {"loss": 1.0}]}}, "1 run"),
    "a type": ({"train b": {"steps": [{"loss": 2}]}}, "steps.0.loss: 2.0 -> 2"),
    "more bytes": ({"train a": {"sizes": {"x_bytes": 9}}}, "Different (1)"),
    "fewer bytes": ({"train a": {"sizes": {"x_bytes": 7}}}, "Fewer planned bytes (1)"),
    "a step more": ({"train b": {"steps": [{"loss": 2.0}, {"loss": 1.0}]}}, "'nothing' -> 1.0"),
    "a field less": ({"train a": {"sizes": {}}}, "sizes.x_bytes: 8 -> 'nothing'"),
    "an empty field less": ({"train b": {"files": None}}, "files: {} -> None"),
    "a run less": ({"train b": None}, "train b is not in the new record"),
    "a run more": ({"train d": {}}, "train d is not in the old record"),
    "a failure": ({"train b": {"error": "E: x"}}, "train b failed in the new record: E: x"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_a_comparison_misses_no_difference(tool, capsys, change, said):
    """Any difference counts, unless the run's name is allowed."""
    compare = tool("fingerprint_compare").compare
    new = {run: parts | (change.get(run) or {}) for run, parts in RECORD.items()}
    new |= {run: parts for run, parts in change.items() if run not in RECORD}
    for run in [run for run, parts in change.items() if parts is None]:
        del new[run]
    assert compare(RECORD, json.loads(json.dumps(new))) == len(change)
    out = capsys.readouterr().out
    if said is None:
        assert out == "3 runs are identical\n"
        return
    assert said in out and "1 are not" in out
    (run,) = change
    assert compare(RECORD, new, [run]) == 0
    assert f"Allowed (1):\n  {run}\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--allow: no run that differs is called 'command \\*'"):
        compare(RECORD, new, [run, "command *"])


def test_a_run_that_failed_in_both_records_proves_nothing(tool):
    failed = {"train a": {"error": "ConfigError: no"}}
    assert tool("fingerprint_compare").compare(failed, failed) == 1
    assert tool("fingerprint_compare").compare(failed, failed, ["train *"]) == 0


def test_fused_products_leave_a_fingerprint(tmp_path, monkeypatch):
    """The record of a GPU, tried on the CPU, and a run that fails: it is named, and counts."""
    out = tmp_path / "gpu.json"
    only = ("--only", "^gpu qwen2 fp8 (fused|apart)")
    status, _, err = fingerprint("--gpu", "--device=cpu", "--out", out, *only)
    assert (status, err) == (0, "")
    found = json.loads(out.read_text())
    kinds = {
        run.rpartition(" ")[2]: set("/".join(kind["kind"] for kind in parts["kinds"]).split("/"))
        for run, parts in found.items()
    }
    of_both = {"gradient", "swiglu", "swiglu_backward"}
    assert of_both <= kinds["fused"] and "gradient" not in kinds["apart"]
    fused, apart = (found[f"gpu qwen2 fp8 {how}"]["steps"][-1] for how in ("fused", "apart"))
    assert fused["loss"] == apart["loss"]  # these products have the bits of two kernels
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wrong = ("--gpu", "--device=cuda", "--out", out, "--only", "^gpu qwen2 bf16 apart")
    status, _, err = fingerprint(*wrong)
    assert status == 1 and err.startswith("gpu qwen2 bf16 apart: ")


def test_golden_plans_are_of_five_cards(tool, monkeypatch):
    """Bytes, launches, FLOPs and predicted seconds of each kind."""
    for name in ("COLUMNS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    tools = tool("fingerprint")
    assert len(tools.GOLDEN) == 40 and len(tools.CARDS) == 5
    found = tools.golden("gpt2-124m --matmul-dtype=e4m3")
    assert found["3090"]["status"] == 2 and "needs compute capability" in found["3090"]["err"]
    plans = {card: found[card]["out"] for card in tools.CARDS if card != "3090"}
    assert len({json.dumps(plan["kinds"]) for plan in plans.values()}) == 4
    for record in plans.values():
        assert record["needed_bytes"] > 1 << 30
        assert all(kind["launches"] and kind["seconds"] for kind in record["kinds"])
        assert sum(kind["flops"] for kind in record["kinds"]) > 0


def test_fingerprints_have_nothing_that_takes_time(tool, monkeypatch):
    """Two runs that are equal may take different times, and say so on the way or not."""
    for name in ("COLUMNS", "OPENBLAS_NUM_THREADS"):  # which the import sets
        monkeypatch.setenv(name, "1")
    fingerprint = tool("fingerprint")
    times = {"communication": 0.5, "waits": (0.5, 0.25), "begin": 1, "end": 2}
    result = Result(loss=1.0, norm=1.0, tokens=1, numbers={"lse_max": 1.0}, **times)
    never_the_same = {field.name for field in fields(Result) if not field.compare}
    assert "waits" in never_the_same
    assert fingerprint.measured(result).keys().isdisjoint(never_the_same)
    shown = "a\n  validation: 7%\nvalidation loss 5\n  validation: 100%\n"
    assert fingerprint.portable(shown) == "a\nvalidation loss 5\n"


# -- mutations -----------------------------------------------------------------------------------


def test_every_mutation_has_its_place(tool, tmp_path):
    run = tool("mutations.run")
    found = run.mutations()
    assert len(found) >= 36
    for mutation in found:
        mutation.place(run.ROOT)
        assert mutation.old != mutation.new and mutation.tests
    (tmp_path / "a.py").write_text("once twice twice")
    change = {"name": "a", "file": "*.py", "new": "never", "tests": []}
    mutation = run.Mutation(**change, old="once")
    with mutation.applied(tmp_path):
        assert (tmp_path / "a.py").read_text() == "never twice twice"
    assert (tmp_path / "a.py").read_text() == "once twice twice"
    for old in ("twice", "nowhere"):
        with pytest.raises(ValueError, match=rf"a: \*\.py has '{old}' [02]x"):
            run.Mutation(**change, old=old).place(tmp_path)


# -- plan_machines ---------------------------------------------------------------------------------


def test_the_table_of_machines_is_what_is_predicted(tool):
    """One row, because all of them take seconds; a change of the prediction changes each."""
    tables = tool("plan_machines")
    (block,) = tables.BLOCK.findall(tables.PAGE.read_text())
    rows = {tuple(line.split(" | ")[:2]): line for line in block.splitlines()}
    small, large = (tables.cells(name, 8, "machine") for name in tables.MODELS)
    assert rows["| 64", "machine"] == f"| {' | '.join(['64', 'machine', *small, *large])} |"
    assert all(f"    {name:4}  {text.split()[0]}" in block for name, text in tables.MODELS.items())


# -- mma_sync ------------------------------------------------------------------------------------
