"""`llmq bench`: configurations, the child that measures, and the report."""

import dataclasses
import io
import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.base.dtypes import F32
from llmq.base.errors import ConfigError, LlmqError
from llmq.bench import BenchOptions, bench, child, measure, sweep_file
from llmq.bench.bench import run_bench
from llmq.bench.child import run_child
from llmq.bench.measure import (
    host_work,
    idle_share,
    launch_times,
    open_trainer,
    planned,
    random_batches,
    settle,
)
from llmq.bench.report import describe, markdown
from llmq.bench.sweep_file import read_runs
from llmq.commands.cli import _run
from llmq.ops.pointwise import elementwise
from llmq.options.options_io import make_config
from llmq.ref.attention.attention import CASES as ATTENTION_CASES
from llmq.ref.product.matmul import CASES as MATMUL_CASES
from llmq.runtime.cost import Kind
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.device import HOST_SPEC, Device, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.timing import LaunchTime, time_launches

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {
    "model": "tiny",
    "from-scratch": True,
    "device": "cpu",
    "model-dtype": "fp32",
    "batch-size": 1,
    "seq-len": 16,
    "grad-accumulation": 2,
}
H100 = "NVIDIA H100 80GB HBM3"


# -- configurations ------------------------------------------------------------------------------


def suite(tmp_path, text):
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    return path


def test_without_a_file_there_is_one_run():
    assert read_runs({"model": "tiny"}, None) == [{"from-scratch": True, "model": "tiny"}]


def test_runs_inherit_and_lists_are_multiplied_out(tmp_path):
    file = suite(
        tmp_path,
        "seq_len: 64\n"
        "model-dtype: [bf16, fp32]\n"
        "runs:\n"
        "  - {model: tiny, batch: [1, 2]}\n"
        "  - {model: tiny-gpt2, model_dtype: fp32}\n",
    )
    found = [
        (run["model"], run["model-dtype"], run.get("batch-size"), run["seq-len"])
        for run in read_runs({"seq-len": "32"}, file)
    ]
    assert found == [
        ("tiny", "bf16", 1, "32"),
        ("tiny", "bf16", 2, "32"),
        ("tiny", "fp32", 1, "32"),
        ("tiny", "fp32", 2, "32"),
        ("tiny-gpt2", "fp32", None, "32"),
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("runs: 3", "runs must be a list of mappings"),
        ("runs: [tiny]", "runs must be a list of mappings"),
        ("[1, 2]", "must hold one mapping"),
        ("a: [", "is not valid"),
        ("model: tiny\nbatch-sise: 4", "unknown option batch-sise, did you mean batch-size"),
        ("model: tiny\nbatch-size: [1, 0]", "--batch-size: must be at least 1"),
        ("model: tiny\nckpt_interval: 4", "--ckpt-interval: has no effect on a benchmark"),
        ("model: tiny\nsteps: 4", "--steps: has no effect on a benchmark"),
        ("model: tiny\nadapter: a", "--adapter: a benchmark has random weights: give the rank"),
        ("model: tiny\nbatch: 4\nbatch_size: 2", "batch-size is given twice"),
        ("model: tiny\nruns:\n- lr: 1\n  lr: 2", "line 4: lr is given in line 3 too"),
        ("model: tiny\nruns: []", "an empty list"),
        ("model: tiny\nbatch: []", "an empty list"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_runs({}, suite(tmp_path, text))


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_runs({}, tmp_path / "none.yaml")


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*/*.yaml")), ids=lambda p: p.name)
def test_our_own_files_are_valid(file):
    for options in read_runs({}, file, trains=file.stem.endswith(("_law", "_losses"))):
        assert describe(options)["model"]


def test_the_facts_about_other_programs_are_found():
    facts = bench.read_facts(BENCHMARKS / "peers.json")
    runs = [describe(options) for options in read_runs({}, BENCHMARKS / "h100" / "h100_bf16.yaml")]
    found = [(bench.peers_of(facts, H100, run), bench.floor_of(facts, H100, run)) for run in runs]
    torch = "transformers+torch.compile"
    assert found == [
        ({"llm.q": 149000}, 212000),
        ({"llm.q": 58600}, 74500),
        ({torch: 124300}, 212000),
        ({torch: 49100}, 74500),
        ({}, 212000),
    ]
    assert bench.peers_of(facts, "another card", runs[0]) == {}
    assert bench.floor_of(facts, "another card", runs[0]) is None
    assert bench.floor_of(facts, H100, runs[0] | {"model": "Qwen2.5-3B"}) == 35796
    assert bench.peers_of(facts, H100, runs[0] | {"seq_len": 512}) == {}
    assert bench.peers_of(facts, H100, runs[0] | {"flags": {"memory-limit": "16GiB"}}) == {}
    fp8 = {"model": "Qwen2.5-7B", "matmul-dtype": "e4m3", "batch-size": 16, "seq-len": 1024}
    four = describe(fp8 | {"gpus": 4, "grad-accumulation": 2, "from-scratch": True})
    assert bench.peers_of(facts, "NVIDIA H200", four) == {"llm.q": 79100}
    heads = [describe(fp8 | {"head-dtype": h, "from-scratch": True}) for h in ("bf16", "e4m3")]
    assert [bench.floor_of(facts, H100, run) for run in heads] == [27127, 28728]


def test_ceilings_are_of_cases_that_exist():
    for card in json.loads((BENCHMARKS / "peers.json").read_text())["ceilings"].values():
        assert set(card["matmul"]) <= set(MATMUL_CASES)
        assert set(card["attention"]) <= set(ATTENTION_CASES)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"runs": 1, "floors": []}', '{"runs": [{}], "floors": []}'),
        '{"runs": [{"device": "C", "system": ["x"], "gpus": 1, "model": "m", "dtype": "fp32", '
        '"batch": 1, "accumulation": 1, "tps": 5}], "floors": []}',
        '{"runs": [], "floors": [{"device": "H", "model": "M", "seq_len": 64, "tps_bf16": 0}]}',
        '{"runs": [], "floors": [{"device": "H", "model": "M", "seq_len": 64, "tps_bf16": "1k"}]}',
    ],
)
def test_wrong_peers(tmp_path, text):
    path = tmp_path / "peers.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--peers"):
        run_bench({"model": "tiny"}, None, BenchOptions(out=tmp_path / "x", peers=path), [])


# -- one run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    """A real run of the tiny preset in a process of its own."""
    return run_child(TINY, steps=1, repeats=3)


def test_child_measures(measured):
    assert measured["status"] == "ok"
    result = measured["result"]
    seconds = result["step_seconds"]
    assert len(seconds) == 3 and min(seconds) > 0
    assert result["tokens_per_second"] == 32 / sorted(seconds)[1]
    assert result["spread"] == (max(seconds) - min(seconds)) / sorted(seconds)[1]
    # Random tokens of a vocabulary of 257, before the model has learned anything.
    assert abs(result["loss"] - np.log(257)) < 0.3
    assert result["first_step_seconds"] > 0
    assert result["memory"]["as_planned"] and result["memory"]["planned"] > 0
    # 8847360 + 197376 + 73728 FLOPs a token, see test_monitor.
    assert result["tflops"] == pytest.approx(9118464 * result["tokens_per_second"] / 1e12)
    on_gpus = (
        "predicted",
        "sol_percent",
        "joules_per_token",
        "kernel_idle",
        "python_busy",
        "waits_per_step",
    )
    assert {result[name] for name in on_gpus} == {None}
    assert measured["machine"]["device"] == "CPU" and measured["gpus"] == 1
    assert {"llmq", "Python", "NumPy"} == set(measured["machine"]["versions"])


@pytest.mark.parametrize(
    "options, status, message",
    [
        ({"memory-limit": "1MiB"}, "does not fit", "out of memory"),
        ({"seq-len": 4096}, "failed", "exceeds the model's 1024 positions"),
    ],
)
def test_child_says_why_not(options, status, message):
    outcome = run_child(TINY | options, steps=1, repeats=1)
    assert outcome["status"] == status
    assert message in outcome["message"]


def test_child_reports_what_nobody_expected(monkeypatch, tmp_path, capsys):
    def broken(**job):
        raise RuntimeError("norm_forward: CUDA_ERROR_ILLEGAL_ADDRESS\n(rank 0, grid 7)")

    monkeypatch.setattr(measure, "measure", broken)
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    files = [str(tmp_path / "result.json"), str(tmp_path / "alive")]
    monkeypatch.setattr(sys, "argv", ["llmq.bench.measure", *files])
    measure.main()
    outcome = json.loads((tmp_path / "result.json").read_text())
    message = "RuntimeError: norm_forward: CUDA_ERROR_ILLEGAL_ADDRESS (rank 0, grid 7)"
    assert outcome == {"status": "failed", "message": message}
    assert "in broken" in capsys.readouterr().err


def test_child_says_what_does_nothing(capfd):
    options = {"p2p": "off", "use-zero-copy": True, "warmup": 1000}
    assert run_child(TINY | options, steps=1, repeats=1)["status"] == "ok"
    assert capfd.readouterr().err == (
        "warning: --p2p off has no effect with --device cpu\nwarning: --use-zero-copy has no "
        "effect without --offload-master, -opt-m, -opt-v or -gradients\n"
    )


def child_runs(monkeypatch, code: str) -> None:
    """Children run this instead; `job` is theirs."""
    command = f"import json, os, signal, sys, time; job = json.load(sys.stdin); {code}"
    monkeypatch.setattr(child, "CHILD", (sys.executable, "-c", command))


def test_child_that_dies(monkeypatch, capfd):
    child_runs(monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")
    outcome = run_child(TINY, steps=1, repeats=1)
    killed = "the process was killed, as the system does when host memory runs out"
    assert outcome == {"status": "failed", "message": killed}
    child_runs(monkeypatch, "os.kill(os.getpid(), signal.SIGSEGV)")
    message = "the process was killed by SIGSEGV"  # as a crash in the driver does
    assert run_child(TINY, steps=1, repeats=1) == {"status": "failed", "message": message}
    child_runs(monkeypatch, "print(job['options']); sys.exit(5)")
    outcome = run_child(TINY, steps=1, repeats=1)
    message = "the process ended with status 5"
    assert outcome == {"status": "failed", "message": message, "last_words": [str(TINY)]}
    assert capfd.readouterr().err == f"{TINY}\n"


HUNG = (
    "no progress for 2 seconds, so the process was ended; raise --watchdog if this is not a hang, "
    "0 switches it off"
)


def test_child_that_hangs(monkeypatch, tmp_path):
    """It is a line of the report with its last words, and the next run has its turn."""
    code = "signal.signal(signal.SIGUSR1, lambda *_: print('in stuck')); print('began'); "
    child_runs(
        monkeypatch, code + "time.sleep(9 if job['options']['seed'] == 1 else 0); sys.exit(5)"
    )
    monkeypatch.setattr(child, "START_SECONDS", 1)
    monkeypatch.setattr(bench, "predict", lambda runs: ([{}] * len(runs), None))
    file = suite(tmp_path, json.dumps(TINY | {"seed": [1, 2], "watchdog": 1}))
    with pytest.raises(LlmqError, match="2 of 2 runs failed"):
        run_bench({}, file, BenchOptions(out=tmp_path / "out", steps=1, repeats=1), [])
    report = (tmp_path / "out.md").read_text()
    words = "\n\n  ```text\n  began\n"
    assert f"- tiny fp32 1 x 2 --seed=1: hung: {HUNG}{words}  in stuck\n  ```\n" in report
    assert f"- tiny fp32 1 x 2 --seed=2: failed: the process ended with status 5{words}" in report


def test_the_report_says_where_a_run_hung_and_not_how_it_began(monkeypatch, tmp_path):
    code = (
        "import faulthandler; faulthandler.register(signal.SIGUSR1, file=sys.stderr); "
        "deeper = lambda n: deeper(n - 1) if n else time.sleep(9); print('began'); deeper(20)"
    )
    child_runs(monkeypatch, code)
    how = BenchOptions(out=tmp_path / "out", steps=1, repeats=1, timeout=1)
    with pytest.raises(LlmqError, match="1 of 1 runs failed"):
        run_bench(TINY, None, how, [])
    shown = (tmp_path / "out.md").read_text().partition("```text\n")[2].partition("```")[0]
    first, second, *rest = shown.rstrip().splitlines()
    assert first.startswith("  Current thread ") and second.endswith(" in <lambda>")
    assert len(rest) == 10 and "in <module>" not in shown


def test_child_that_is_late(monkeypatch):
    """It makes progress, and is ended all the same."""
    code = (
        "import pathlib; [(pathlib.Path(sys.argv[2]).touch(), time.sleep(0.1)) for _ in range(99)]"
    )
    child_runs(monkeypatch, code)
    outcome = run_child(TINY, steps=1, repeats=1, timeout=1)
    assert outcome["status"] == "hung"
    assert outcome["message"].startswith(
        "not done after 1 seconds, so the process was ended; raise "
    )
    assert "raise --timeout if this is not a hang" in outcome["message"]


def test_child_shows_progress(tmp_path):
    alive = tmp_path / "alive"
    with open_trainer(TINY, 4) as trainer:
        thread = threading.Thread(target=measure._show_progress, args=(trainer, alive), daemon=True)
        thread.start()
        for _ in range(2):
            alive.unlink(missing_ok=True)
            trainer.step(random_batches(trainer))
            deadline = time.monotonic() + 30
            while not alive.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert alive.exists()
    thread.join()


def test_random_batches_cover_the_vocabulary():
    with open_trainer(TINY | {"batch-size": 8, "seq-len": 512}, 1) as trainer:
        batches = random_batches(trainer)
    assert len(batches) == 2
    for batch in (batch[:2] for batch in batches):
        assert [a.shape for a in batch] == [(8, 512)] * 2
        assert [a.dtype for a in batch] == [np.int32] * 2
        assert all((a.min(), a.max()) == (0, 256) for a in batch)
    assert not np.array_equal(*batches[0][:2])


def test_speed_is_predicted_from_the_plan_of_the_run():
    with open_trainer(TINY, 1) as trainer:
        assert measure.predicted_speed(trainer) == planned(TINY)[0]["tokens_per_second"]


def test_launches_of_a_step_are_timed_without_changing_it():
    with open_trainer(TINY, 4) as plain, open_trainer(TINY, 4) as timed:
        batches = random_batches(plain)
        launches = launch_times(timed, batches)  # two steps
        plain.step(batches), plain.step(batches)
        assert plain.step(batches) == timed.step(batches)
        assert len(launches) == timed.plan.launches
        assert sum(launch.flops for launch in launches) == timed.plan.flops
        assert sum(launch.traffic for launch in launches) == timed.plan.traffic
        seconds, waits = host_work(timed, batches)
        assert seconds > 0 and waits is None
    assert {"zero", "copy", "adamw", "matmul nt 16x256x128"} <= {launch.name for launch in launches}


def test_clocks_settle_before_steps_are_timed(monkeypatch):
    """In as many steps as that takes; repeats are as long as they are asked to be, or longer."""
    with open_trainer(TINY, 100) as trainer:
        batches = random_batches(trainer)
        start = time.monotonic()
        assert settle(trainer, batches, 5, duration=0.2, repeat=0.0) == 5
        assert 0.2 <= time.monotonic() - start < 10
        monkeypatch.setattr(measure, "steps_for", lambda *_: [0.3, 0.04])
        assert settle(trainer, batches, 5, repeat=1.0) == 25


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


def test_host_work_is_what_enqueueing_takes_without_waits():
    dev = BusyGpu()
    step = StepOf(dev)
    trainer = SimpleNamespace(
        dev=dev,
        ranks=SimpleNamespace(first=SimpleNamespace(step=step)),
        enqueue_step=lambda batches: step.train(batches),
        result=lambda ticket: time.sleep(0.3) if ticket == 7 else None,
    )
    seconds, waits = host_work(trainer, [1, 2, 3])
    # The step's own wait of 0.2 s is a part of it; those between the micro-steps are not.
    assert 0.27 <= seconds < 0.4
    assert waits == 1
    assert "graph" not in vars(dev) and "train" not in vars(step)


def test_idle_share():
    launches = [LaunchTime("a", 30.0, 0, 0, True), LaunchTime("b", 60.0, 0, 0, True)]
    launches.append(LaunchTime("copy", 500.0, 0, 0, False))  # beside them
    assert idle_share(launches, 0.1) == pytest.approx(0.1)


class FakeEvents:
    """CUDA's runtime with a clock that every recorded event moves on by its number."""

    def __init__(self):
        self.clock, self.recorded, self.live = 0.0, {}, set()

    def eventCreate(self):
        handle = len(self.recorded) + len(self.live) + 1000
        self.live.add(handle)
        return handle

    def eventRecord(self, event, stream):
        assert stream == 7
        self.clock += 0.25
        self.recorded[event] = self.clock

    def eventElapsedTime(self, first, second):
        return self.recorded[second] - self.recorded[first]

    def eventDestroy(self, event):
        self.live.remove(event)


class FakeGpu(HostDevice):
    """Takes 5 ms for a fill with zeros, and no time for a launch."""

    kind = "cuda"
    stream = 7
    without_graphs, _switch = CudaDevice.without_graphs, Device._switch

    def __init__(self):
        super().__init__(MemorySizes(device=1 << 20, stack=0, pinned=0))
        self.api, self.use_graphs = FakeEvents(), True
        self._streams = {"main": self.stream}

    def zero(self, tensor):
        self.api.clock += 5.0


def test_launches_on_a_gpu_are_timed_by_events_and_without_graphs():
    dev = FakeGpu()
    x = dev.alloc("x", (8,), F32, "Activations")
    graphs = []

    def work():
        graphs.append(dev.use_graphs)
        elementwise.fill(dev, x, 3.0)
        dev.api.clock += 2.0  # between launches: counts for none
        dev.zero(x)

    launches = time_launches(dev, work)
    # Each span holds one record of 0.25 ms, which the empty spans show to be its own cost.
    filled = LaunchTime("fill", 0.0, 32, 0, True, Kind("fill/f32", (32,)))
    assert launches == [filled, LaunchTime("zero", 5.0, 32, 0, True, Kind("zero/", (32,)))]
    assert graphs == [False] and dev.use_graphs
    assert not dev.api.live
    assert not {"launch", "copy", "zero"} & set(vars(dev))


def test_launches_of_other_streams_can_be_timed_in_turn():
    dev = FakeGpu()
    x = dev.alloc("x", (8,), F32, "Activations")

    def work():
        with dev.on("comm"):
            dev.zero(x)
        dev.zero(x)

    assert [launch.main for launch in time_launches(dev, work)] == [False, True]
    assert [launch.main for launch in time_launches(dev, work, in_turn=True)] == [True, True]
    assert "on" not in vars(dev)


# -- many runs, and the report -------------------------------------------------------------------

RESULT = {
    "tokens_per_second": 153123.4,
    "spread": 0.0042,
    "step_seconds": [3.4, 3.42, 3.43],
    "sol_percent": 47.88,
    "tflops": 473.6,
    "memory": {"planned": 40 << 30, "used": 41 << 30, "as_planned": True},
    "joules_per_token": 0.004321,
    "kernel_idle": 0.0151,
    "python_busy": 0.031,
    "waits_per_step": 0,
    "first_step_seconds": 9.87,
    "loss": 11.9,
    "gpu": None,
}
MACHINE = {
    "device": H100,
    "gpu": {"driver": "580.159.04"},
    "versions": {"llmq": "0.1", "CuPy": "14"},
}


def bench_with(monkeypatch, tmp_path, outcomes, file, given=None, **more):
    """Run the parent with these outcomes of its children."""
    outcomes = iter(outcomes)
    monkeypatch.setattr(bench, "run_child", lambda *_: next(outcomes))
    monkeypatch.setattr(bench, "predict", lambda runs: ([{}] * len(runs), None))
    how = BenchOptions(out=tmp_path / "h100.v1", peers=BENCHMARKS / "peers.json", **more)
    run_bench(given or {}, file, how, ["/usr/bin/llmq", "bench", "--config", "a b.yaml"])


def test_memory_that_is_not_as_planned():
    """The stack may be smaller: a validation, which is not measured, may take the most of it."""
    planned = MemorySizes(device=1 << 20, stack=1 << 16, pinned=256)

    def as_planned(**found):
        sizes = MemorySizes(**planned | found)
        usages = [SimpleNamespace(sizes=s, device_bytes=0) for s in (planned, sizes)]
        plan = SimpleNamespace(usage=usages[0])
        dev = SimpleNamespace(spec=HOST_SPEC, kind="host")
        trainer = SimpleNamespace(plan=plan, usage=usages[1], dev=dev)
        return measure._memory(trainer)["as_planned"]

    assert as_planned() and as_planned(stack=1 << 15)
    for found in ({"stack": 1 << 17}, {"device": 1 << 19}, {"pinned": 0}):
        assert not as_planned(**found)


def test_report(monkeypatch, tmp_path, capsys):
    slow = RESULT | {
        "tokens_per_second": 60000.0,
        "joules_per_token": None,
        "memory": RESULT["memory"] | {"as_planned": False},
    }
    outcomes = [
        {"status": "ok", "result": RESULT, "machine": MACHINE},
        {"status": "does not fit", "message": "out of memory: 90 GiB are needed"},
        {"status": "ok", "result": RESULT | {"tokens_per_second": 130000.0}, "machine": MACHINE},
        {"status": "ok", "result": slow, "machine": MACHINE},
        {"status": "does not fit", "message": "neither does this"},
    ]
    bench_with(monkeypatch, tmp_path, outcomes, BENCHMARKS / "h100" / "h100_bf16.yaml")
    text = (tmp_path / "h100.v1.md").read_text()
    assert capsys.readouterr().out == text + "\n"
    lines = text.splitlines()
    assert lines[0] == f"# {H100}, driver 580.159.04"
    assert lines[2].startswith("`llmq bench --config 'a b.yaml'`, 20")
    assert lines[2].endswith("UTC, 3 x 5 steps or more")
    assert lines[3] == "llmq 0.1; CuPy 14"
    assert "All runs: --opt-m-dtype=bf16 --opt-v-dtype=bf16 --seq-len=1024" in lines
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == (
        "| model | dtype | batch | tok/s | ± | SOL | TFLOP/s | of floor | memory, GiB | mJ/token "
        "| idle | Python | waits | start, s | llm.q | transformers+torch.compile |"
    )
    assert table[2] == (
        "| Qwen2.5-0.5B | bf16 | 32 x 16 | 153,123 | 0.4% | 47.9% | 474 | 212.0k (0.72x) "
        "| 41.00 (1.025x) | 4.32 | 1.5% | 3.1% | 0 | 9.9 | 149.0k (1.03x) |  |"
    )
    assert table[3].endswith("|  | 124.3k (1.05x) |")
    assert "| 41.00 (1.025x)* |  |" in table[4]
    assert len(table) == 5
    run = "Qwen2.5-1.5B bf16 32 x 8 --lmhead-chunks=4"
    assert f"- {run}: does not fit: out of memory: 90 GiB are needed" in lines
    report = json.loads((tmp_path / "h100.v1.json").read_text())
    assert report["machine"] == MACHINE
    statuses = [run["status"] for run in report["runs"]]
    assert statuses == ["ok", "does not fit", "ok", "ok", "does not fit"]
    assert report["runs"][0]["result"] == RESULT
    assert report["runs"][0]["peers"] == {"llm.q": 149000}
    assert report["runs"][0]["options"]["grad-accumulation"] == 16


def test_flags_that_differ_are_a_column(monkeypatch, tmp_path):
    file = suite(tmp_path, "model: tiny\nrecompute-block: [true, false]\nlmhead-chunks: 2\n")
    ok = {"status": "ok", "result": RESULT, "machine": MACHINE}
    bench_with(monkeypatch, tmp_path, [ok, ok], file)
    lines = (tmp_path / "h100.v1.md").read_text().splitlines()
    assert "All runs: --lmhead-chunks=2" in lines
    cells = [line.split(" | ")[3] for line in lines if line.startswith("|")]
    assert cells == ["flags", "---", "--recompute-block", "--no-recompute-block"]


def test_all_gpus_are_as_many_as_there_are(monkeypatch, tmp_path):
    """Without --gpus a run takes all: its speed is not compared with those of one."""
    file = suite(tmp_path, "model: Qwen2.5-0.5B\nbatch-size: 32\ngrad-accumulation: 16\n")
    ok = {"status": "ok", "result": RESULT, "machine": MACHINE}
    for gpus, others, floor, flags in ((1, {"llm.q": 149000}, 212000, {}), (4, {}, None, 4)):
        bench_with(monkeypatch, tmp_path, [ok | {"gpus": gpus}], file, overwrite=True)
        (run,) = json.loads((tmp_path / "h100.v1.json").read_text())["runs"]
        assert (run["gpus"], run["peers"], run["floor"]) == (gpus, others, floor)
        assert run["flags"] == ({"gpus": "--gpus=4"} if flags else {})
        assert ("All runs: --gpus=4" in (tmp_path / "h100.v1.md").read_text()) == bool(flags)


def test_failed_runs_end_the_command_but_not_the_others(monkeypatch, tmp_path, capsys):
    outcomes = [
        {"status": "failed", "message": "no NVIDIA driver is installed"},
        {"status": "ok", "result": RESULT, "machine": MACHINE},
    ]
    file = suite(tmp_path, "model: tiny\nbatch-size: [1, 2]\n")
    with pytest.raises(LlmqError, match="1 of 2 runs failed"):
        bench_with(monkeypatch, tmp_path, outcomes, file)
    text = (tmp_path / "h100.v1.md").read_text()
    assert "- tiny bf16 1 x 4: failed: no NVIDIA driver is installed" in text
    assert "| tiny | bf16 | 2 x 4 | 153,123 |" in text
    assert "[2/2] tiny bf16 2 x 4 ...\n  ok: 153,123 tok/s\n" in capsys.readouterr().err


def test_equal_runs_are_equal_in_another_minute(monkeypatch):
    minutes = iter(range(60))

    def later(options):
        now = datetime(2026, 1, 1, 0, next(minutes), tzinfo=UTC)
        return dataclasses.replace(make_config(options), log_file=None).normalized(now)

    monkeypatch.setattr(sweep_file, "make_config", later)
    assert sweep_file.identity(TINY) == sweep_file.identity(TINY | {"watchdog": 7})
    assert sweep_file.identity(TINY) != sweep_file.identity(TINY | {"seed": 7})


def test_the_folder_of_the_report_is_made_before_measuring(monkeypatch, tmp_path):
    ok = {"status": "ok", "result": RESULT, "machine": MACHINE}
    bench_with(monkeypatch, tmp_path / "new" / "er", [ok], None, given={"model": "tiny"})
    assert (tmp_path / "new" / "er" / "h100.v1.md").exists()
    (tmp_path / "file").touch()
    with pytest.raises(LlmqError, match="cannot write"):  # no outcome: nothing may be measured
        bench_with(monkeypatch, tmp_path / "file", [], None, given={"model": "tiny"})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(LlmqError, match="--out: cannot write into"):
        bench_with(monkeypatch, tmp_path, [], None, given={"model": "tiny"})


def test_report_without_any_result():
    run = describe({"model": "tiny"}) | {"status": "failed", "message": "why", "peers": {}}
    invocation = {"date": "d", "command": "c", "steps": 1, "repeats": 1}
    text = markdown({"invocations": [invocation], "machine": None, "runs": [run]})
    assert text.startswith("`c`, d, 1 x 1 steps\n\n- tiny bf16 4 x 4: failed: why\n")


def test_command_line(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(bench, "run_bench", lambda *args: calls.append(args))
    file = tmp_path / "x.yaml"
    args = ["--config", str(file), "--timed-steps", "2", "--out", "there", "--batch", "8"]
    args += ["--plan-first", "--resume", "--retry", "--timeout", "60"]
    assert _run(["bench", *args]) == 0
    how = BenchOptions(
        out=Path("there"), steps=2, plan_first=True, resume=True, retry=True, timeout=60.0
    )
    assert calls == [({"batch-size": "8"}, file, how, sys.argv)]
