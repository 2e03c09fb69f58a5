"""`llmq bench`: configurations, the child that measures, and the report."""

import io
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.base.dtypes import F32
from llmq.base.errors import LlmqError
from llmq.bench import BenchOptions, bench, child, measure
from llmq.bench.bench import run_bench
from llmq.bench.child import run_child
from llmq.bench.measure import (
    idle_share,
    launch_times,
    open_trainer,
    planned,
    random_batches,
    settle,
)
from llmq.commands.cli import _run
from llmq.ops.pointwise import elementwise
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


def test_ceilings_are_of_cases_that_exist():
    for card in json.loads((BENCHMARKS / "peers.json").read_text())["ceilings"].values():
        assert set(card["matmul"]) <= set(MATMUL_CASES)
        assert set(card["attention"]) <= set(ATTENTION_CASES)


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
    on_gpus = ("predicted", "sol_percent", "joules_per_token")
    assert {result[name] for name in on_gpus} == {None}
    assert measured["machine"]["device"] == "CPU" and measured["gpus"] == 1
    assert {"llmq", "Python", "NumPy"} == set(measured["machine"]["versions"])


def test_child_reports_what_nobody_expected(monkeypatch, tmp_path, capsys):
    def broken(job):
        raise RuntimeError("norm_forward: CUDA_ERROR_ILLEGAL_ADDRESS\n(rank 0, grid 7)")

    monkeypatch.setattr(measure, "measure", broken)
    monkeypatch.setattr(child, "end_with", lambda parent: None)
    job = {"parent": 1, "seconds": 0, "options": {}}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(job)))
    result, alive = tmp_path / "result.json", tmp_path / "alive"
    monkeypatch.setattr(sys, "argv", ["", "llmq.bench.measure:measure", str(result), str(alive)])
    child.main()
    message = "RuntimeError: norm_forward: CUDA_ERROR_ILLEGAL_ADDRESS (rank 0, grid 7)"
    assert json.loads(result.read_text()) == {"result": {}, "error": message}
    assert "in broken" in capsys.readouterr().err


def suite(tmp_path, text):
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    return path


def child_runs(monkeypatch, code: str) -> None:
    """Children run this instead; `job` is theirs."""
    command = "import json, os, signal, sys, time; job = json.load(sys.stdin)['options']; "
    monkeypatch.setattr(child, "CHILD", (sys.executable, "-c", command + code))


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
    """A child that hangs is a line of the report, and the next run follows."""
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
    """A child that makes progress beyond --timeout is ended."""
    code = (
        "import pathlib; [(pathlib.Path(sys.argv[3]).touch(), time.sleep(0.1)) for _ in range(99)]"
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
    assert {"zero", "copy", "adamw", "matmul nt 16x256x128"} <= {launch.name for launch in launches}


def test_clocks_settle_before_steps_are_timed(monkeypatch):
    """Clocks settle in as many steps as needed; repeats are at least as long as asked."""
    with open_trainer(TINY, 100) as trainer:
        batches = random_batches(trainer)
        start = time.monotonic()
        assert settle(trainer, batches, 5, duration=0.2, repeat=0.0) == 5
        assert 0.2 <= time.monotonic() - start < 10
        monkeypatch.setattr(measure, "steps_for", lambda *_: [0.3, 0.04])
        assert settle(trainer, batches, 5, repeat=1.0) == 25


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
