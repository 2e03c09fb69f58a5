"""`llmq top`: a run that goes on, seen from another process."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import threading
import time
from contextlib import closing

import pytest
from rich.console import Console

from llmq.base.errors import DataError, LlmqError
from llmq.base.locks import lock_beside, locked
from llmq.commands.cli import _run
from llmq.report.json_log import JsonLog
from llmq.run import top as top_module
from llmq.run.run_paths import has_writer, running_log
from llmq.run.top import Follower, Top, run_top
from tests.fake_nvml import FakeGpu, FakeNvml

RUN = {"id": "a1b2c3d4e5f6", "name": "mine"}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(top_module, "FIRST_LOOK", 0.0)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def machine(monkeypatch):
    """Sets the GPUs of this machine; without it there is no NVML."""
    monkeypatch.setattr(top_module, "find_nvml", lambda: None)

    def have(*gpus):
        nvml = FakeNvml(*gpus)
        monkeypatch.setattr(top_module, "find_nvml", lambda: nvml)
        return nvml

    return have


def step(number, loss=3.0):
    return {
        "step": number,
        "loss": loss,
        "norm": 0.5,
        "lr": 1e-3,
        "duration_ms": 500,
        "step_tokens": 1024,
    }


def model(rank, gpu, **more):
    uuid = gpu.uuid.removeprefix("GPU-").replace("-", "")
    return {"rank": rank, "name": gpu.name, "uuid": uuid, "bus_id": gpu.bus_id, **more}


def write(path, *records, resumed_at=0):
    """Add records, (kind, fields), to a log behind those that begin it."""
    log = JsonLog(path, append=path.exists())
    if records[:1] != ("only",):
        log.write("cmd", 0, run=RUN, cmd=["llmq"], resumed_at=resumed_at)
        log.write("option", 0, name="steps", value=100)
    for kind, fields in records[records[:1] == ("only",) :]:
        log.write(kind, **({"step": 0} | fields))
    log.close()


def shown(capsys):
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_run_with_gpus_here_and_elsewhere(machine, tmp_path, capsys):
    """GPUs of this machine are found by UUID, whatever CUDA_VISIBLE_DEVICES was."""
    gpus = [FakeGpu(i, power=100_000 * (i + 1)) for i in range(3)]
    machine(*gpus)
    far = {"throttle": "power cap", "reasons": {"heat": 60}, "power": 450_000, "clock": 1500}
    path = tmp_path / "run.json"
    write(
        path,
        ("gpu-model", model(0, gpus[2])),
        ("gpu-model", model(1, gpus[0])),
        ("gpu-model", model(2, FakeGpu(7), machine="b")),
        ("gpu-model", model(3, FakeGpu(6), machine="b")),
        ("step", step(0, 5.0)),
        ("gpu", {"rank": 0, "communication": 5.0}),
        ("gpu", {"rank": 1, "communication": 25.0}),
        ("gpu", {"rank": 2, "communication": 25.0, **far}),
        ("eval", {"step": 1, "loss": 2.5}),
        ("step", step(1)),
    )
    with locked(lock_beside(path), "--log-file", path):
        run_top(path)
    title, progress, numbers, curve, heading, *rows, waiting = shown(capsys)
    assert title.startswith("mine  /")
    assert progress.startswith("step 2/100") and "2,048 tok/s   0:00:49 left" in progress
    assert numbers == "loss 3   norm 0.5   lr 0.001   eval 2.5"
    assert len(curve) == 2 and heading.startswith("GPU use")
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert "300/700" in rows[0] and rows[0].endswith("1.0%")
    assert "100/700" in rows[1] and rows[1].endswith("5.0%")
    assert " 450 " in rows[2] and "heat" in rows[2]
    assert rows[3] == "  3 no readings here, and none in the log yet"
    assert waiting.endswith("the others wait for GPU 0, 4.0% of it")


def test_without_nvml_the_log_is_what_there_is(machine, tmp_path, capsys):
    path = tmp_path / "run.json"
    sample = {"gpu_util": 77, "power": 100_000, "throttle": "no cap", "reasons": {}}
    write(path, ("gpu-model", model(0, FakeGpu())), ("gpu", {"rank": 0, **sample}))
    with locked(lock_beside(path), "--log-file", path):
        run_top(path, once=True)
    assert " 77% " in shown(capsys)[-1]


def test_a_run_that_reads_no_sensors(machine, tmp_path):
    """A log without readings has bus ids of GPUs, which mean something on the run's machine."""
    path = tmp_path / "run.json"
    machine(FakeGpu(0), FakeGpu(1, power=123_000))
    write(path, ("gpu-model", model(0, FakeGpu(1)) | {"uuid": ""}))
    for there, power in ((False, None), (True, 123_000)):
        with locked(lock_beside(path), "--log-file", path):
            if not there:
                lock_beside(path).write_text("llmq: process 1 on another-machine\n")
            top = Top(path)
            assert top.rows()[0].sample.get("power") == power
            top.close()


def test_a_run_on_the_cpu(machine, tmp_path, capsys):
    path = tmp_path / "run.json"
    far = {"rank": 1, "machine": "b", "util": 50, "memory_used": 1 << 30, "memory_total": 1 << 31}
    here = {"rank": 0, "machine": socket.gethostname(), "util": 1}
    write(path, ("step", step(0)), ("cpu", here), ("cpu", far))
    with locked(lock_beside(path), "--log-file", path):
        run_top(path)
    own, other = shown(capsys)[-2:]
    assert own.startswith("CPU ") and " cores  memory " in own
    assert other == "CPU b ████▌      50% memory 1.0/2.0 GiB"


def test_the_machine_alone(machine, capsys):
    machine(FakeGpu(0), FakeGpu(1, lost=True), FakeGpu(2))
    run_top(None)
    lines = shown(capsys)
    assert [line.split()[0] for line in lines] == ["GPU", "0", "1", "2"]
    assert lines[2].split() == ["1", "does", "not", "answer"]


def test_errors_of_gpus(machine):
    nvml = machine(FakeGpu(0), FakeGpu(1))
    top = Top(None)
    nvml.gpus[0].xids, nvml.gpus[1].xids = [31, 45], [79]
    top._sensors._round()
    top.look()
    shown = [str(text) for text in top.render().renderables[1:]]
    assert shown == [
        "GPU 0: Xid 45, what was left of a program was cleaned up",
        "GPU 1: Xid 79, the GPU has fallen off the bus",
    ]
    top.close()


def test_a_machine_without_gpus(machine, capsys):
    run_top(None)
    (line,) = shown(capsys)
    assert line.startswith("CPU ") and " cores  memory " in line


@pytest.mark.parametrize("end", ["Done. validation loss   3.1", "Stopped by SIGTERM after 1 steps"])
def test_a_run_that_has_ended(machine, tmp_path, capsys, end):
    path = tmp_path / "run.json"
    write(path, ("step", step(0)), ("info", {"type": "message", "message": end}))
    run_top(path)
    lines = shown(capsys)
    assert lines[0].startswith("mine has ended  /")
    assert len(lines) == 4, "nothing of GPUs, which may work for others now"
    assert "tok/s" in lines[1] and "left" not in lines[1]


@pytest.mark.parametrize(("cmd", "state"), [([], " has ended"), (["--restarts=0"], "")])
def test_a_run_that_was_killed_just_now(machine, tmp_path, capsys, cmd, state):
    """The lock of a killed run is still there; --restarts may start the run again."""
    path = tmp_path / "run.json"
    write(
        path,
        "only",
        ("cmd", {"run": RUN, "cmd": ["llmq", *cmd], "resumed_at": 0}),
        ("step", step(0)),
    )
    lock_beside(path).write_text(f"llmq: process {ended_process()} on {socket.gethostname()}\n")
    run_top(path, once=True)
    assert shown(capsys)[0].startswith(f"mine{state}  /")


def test_a_run_that_goes_on_begins_where_it_was(tmp_path):
    path = tmp_path / "run.json"
    write(path, ("step", step(8)), ("info", {"type": "message", "message": "Stopped by SIGINT"}))
    follower = Follower(path)
    follower.look()
    assert follower.ended
    write(path, resumed_at=5)
    follower.look()
    assert not follower.ended
    assert follower.progress._state["step"] == 5
    write(path, "only", ("step", step(5, None)))
    follower.look()
    assert follower.progress._state["step"] == 6


GPU = {"gpu-model": {"rank": 0, "name": "NVIDIA H100", "bus_id": "", "uuid": ""}}


@pytest.mark.parametrize(
    "records",
    [
        {"gpu-model": {"rank": -1}},
        {"gpu-model": {"rank": 10**9}},  # for which there would be no memory
        GPU | {"gpu": {"rank": 0, "gpu_util": "much"}},
        GPU | {"gpu": {"rank": 0, "reasons": [1]}},
        {"cpu": {"rank": 0, "machine": "another", "util": "much"}},
        {"step": {"loss": 3.0}},
        {"step": step(0) | {"step_tokens": "many"}},
        {"step": step(10**400)},
    ],
)
def test_a_log_whose_records_cannot_be_shown_is_refused(machine, tmp_path, capsys, records):
    """Bad records are refused at each look, before a thread draws them."""
    path = tmp_path / "a.json"
    write(path)
    with closing(Top(path)) as top:
        write(path, "only", *records.items())
        with pytest.raises(DataError, match=r"not as it should be \("):
            top.look()
    assert _run(["top", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert "sensors" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("moved", [True, False])
def test_a_log_that_is_moved_or_cut_says_so(tmp_path, moved):
    """The run begins it anew with the record that it had first."""
    log = JsonLog(tmp_path / "a.json")
    log.write("cmd", 0, run=RUN, cmd=["llmq"] * 99, resumed_at=0)
    for number in range(20):
        log.write(**step(number), log="step")
    follower = Follower(log.path)
    follower.look()
    if moved:
        log.path.rename(tmp_path / "old.json")
    else:
        os.truncate(log.path, 1500)
    log.write(**step(20), log="step")
    with pytest.raises(LlmqError, match=r"a\.json' has been cut or begun anew: start again"):
        follower.look()
    log.close()


# -- which log -----------------------------------------------------------------------------------


def test_the_newest_log_that_is_being_written(tmp_path, machine, capsys):
    assert running_log() is None
    paths = [tmp_path / "logs" / f"{name}.json" for name in "abc"]
    for age, path in enumerate(reversed(paths)):
        write(path, ("step", step(0)))
        os.utime(path, (time.time() - 1000 * age,) * 2)
    assert running_log() is None
    with locked(lock_beside(paths[0].resolve()), "--log-file", paths[0]):
        assert running_log().name == "a.json"
        with locked(lock_beside(paths[1].resolve()), "--log-file", paths[1]):
            assert running_log().name == "b.json"
            assert _run(["top"]) == 0
            assert shown(capsys)[0] == "mine  logs/b.json"
    assert running_log() is None


def ended_process():
    """The id of one."""
    with subprocess.Popen(["true"]) as ended:
        return ended.pid


def test_locks_of_others(tmp_path):
    path = tmp_path / "run.json"
    write(path, ("step", step(0)))
    lock = lock_beside(path)
    for text, written in [
        (f"process {ended_process()} on {socket.gethostname()}", False),
        (f"process 1 on {socket.gethostname()}", True),
        ("process 1 on another-machine", True),
        ("something else", False),
    ]:
        lock.write_text(f"llmq: {text}\n")
        assert bool(has_writer(path)) is written
    lock.write_text("llmq: process 1 on another-machine\n")
    os.utime(path, (time.time() - 1000,) * 2)
    assert not has_writer(path)


def test_on_a_terminal_it_is_drawn_until_the_run_ends(machine, tmp_path, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    monkeypatch.setattr(top_module, "printable_console", lambda: console)
    path = tmp_path / "run.json"
    write(path, ("step", step(0)))
    looks = []
    look = Top.look

    def then_it_ends(self):
        looks.append(1)
        if len(looks) == 4:
            write(path, "only", ("info", {"type": "message", "message": "Done. validation loss"}))
        look(self)

    monkeypatch.setattr(Top, "look", then_it_ends)
    with locked(lock_beside(path), "--log-file", path):
        run_top(path, every=0.01)
    assert len(looks) == 4
    assert "mine has ended" in screen.getvalue() and "\x1b[?25h" in screen.getvalue()


def test_ctrl_c_is_how_one_leaves_it(machine, tmp_path, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr(top_module, "printable_console", lambda: console)
    monkeypatch.setattr(top_module.time, "sleep", interrupt)
    assert _run(["top"]) == 0
