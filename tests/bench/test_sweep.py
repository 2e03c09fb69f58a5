"""Sweeps: what is planned first, what survives an interruption, what is said of failed runs."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys

import pytest

from llmq.base import files
from llmq.base.errors import ConfigError, LlmqError
from llmq.bench import BenchOptions, bench, child, measure, report_file
from llmq.bench.bench import run_bench
from llmq.commands.cli import _run
from tests.sweeps import GRID, MACHINE, TABLE, Sweeps, ok, planned

FAILED = {"status": "failed", "message": "it broke", "last_words": ["Traceback", "it broke here"]}


@pytest.fixture
def sweeps(tmp_path, monkeypatch):
    return Sweeps(tmp_path, monkeypatch)


def stop(options):
    raise KeyboardInterrupt


# -- resuming ------------------------------------------------------------------------------------


def test_a_sweep_and_its_files(sweeps, capsys):
    sweeps.make()
    assert sweeps.made == TABLE and list(sweeps.statuses()) == TABLE
    report = sweeps.report()
    assert (report["left"], report["running"]) == (0, None)
    assert {p.name for p in sweeps.out.parent.iterdir()} == {
        *(f"out.{suffix}" for suffix in ("json", "md", "csv", "png")),
        "sweep.yaml",
    }
    printed = capsys.readouterr()
    assert printed.out == sweeps.text("md") + "\n"
    assert ", 3 x 5 steps\n" in printed.out  # on the CPU
    assert "[6/6] tiny-gpt2 bf16 4 x 4" in printed.err


def test_only_what_is_missing_is_made_after_ctrl_c(sweeps, capsys):
    sweeps.make()
    table = sweeps.table()
    sweeps.out.with_name("out.json").unlink()
    sweeps.made.clear()
    sweeps.outcomes = {("tiny", 4): stop, ("tiny", 2): FAILED}
    with pytest.raises(KeyboardInterrupt):
        sweeps.make()
    assert "2 of 6 runs are in" in capsys.readouterr().err
    report = sweeps.report()
    assert (report["left"], report["running"]) == (4, None)
    assert "4 runs are still to be made: `llmq bench --resume` goes on." in sweeps.text("md")
    sweeps.outcomes = {}
    sweeps.made.clear()
    with pytest.raises(LlmqError, match=r"1 of 6 runs failed.*--resume --retry makes them again"):
        sweeps.make(resume=True)
    assert sweeps.made == TABLE[2:]
    assert "2 of 6 runs are done" in capsys.readouterr().err
    assert "  ```text\n  Traceback\n  it broke here\n  ```" in sweeps.text("md")
    sweeps.made.clear()
    sweeps.make(resume=True, retry=True)
    assert sweeps.made == [("tiny", 2)]
    assert sweeps.table() == table
    sweeps.make(resume=True)
    assert sweeps.made == [("tiny", 2)] and sweeps.table() == table


def test_names_that_are_not_utf8(sweeps):
    run_bench(
        {}, sweeps.file, BenchOptions(out=sweeps.out), ["llmq", "bench", "--out", "night\udcff"]
    )
    assert list(sweeps.statuses()) == TABLE
    assert all("udcff" in sweeps.text(suffix) for suffix in ("json", "md"))


def test_a_run_for_which_the_disk_has_no_room_is_told(sweeps, monkeypatch, capsys):
    def full(path, content):
        if '"left": 5' in content:
            raise LlmqError("the disk is full")

    monkeypatch.setattr(report_file, "write_file", full)
    with pytest.raises(LlmqError, match="the disk is full"):
        sweeps.make()
    assert capsys.readouterr().err.splitlines()[-1].startswith("  ok: 1,")


def test_a_sweep_that_did_not_end_is_not_overwritten(sweeps):
    sweeps.outcomes = {("tiny", 4): stop}
    with pytest.raises(KeyboardInterrupt):
        sweeps.make()
    before = sweeps.report()
    with pytest.raises(
        ConfigError, match=r"--out: .*out\.json is of a sweep that did not end, 4 r"
    ):
        sweeps.make()
    assert sweeps.report() == before
    sweeps.outcomes = {}
    sweeps.make(overwrite=True)
    with pytest.raises(ConfigError, match=r"--out: .*out\.json is a finished report, --overw"):
        sweeps.make()
    assert sweeps.report()["left"] == 0
    with pytest.raises(ConfigError, match="--overwrite: begins anew, --resume keeps"):
        sweeps.make(overwrite=True, resume=True)
    sweeps.out.with_name("out.json").write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=r"--out: .* is not a report of llmq bench"):
        sweeps.make()


DAMAGES = {
    "no flags": lambda report: report["runs"][0].pop("flags"),
    "no memory": lambda report: report["runs"][0]["result"].pop("memory"),
    "no device": lambda report: report["machine"].pop("device"),
    "odd running": lambda report: report.update(running=3),
    "odd options": lambda report: report["runs"][0].update(options=[]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_report_is_refused_before_anything_is_made(sweeps, damage):
    """The damage would otherwise show when the report is written after the first further run."""
    sweeps.make()
    made, path = list(sweeps.made), sweeps.out.with_name("out.json")
    report = sweeps.report()
    damage(report)
    path.write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=r"--resume: .*out\.json is not a report of llmq bench"):
        sweeps.make(resume=True)
    assert sweeps.made == made and json.loads(path.read_text()) == report


def test_a_run_that_ended_the_driver_comes_last(sweeps):
    """A run that may take the machine down is tried again after all others."""

    def crash(options):
        os._exit(9)

    sweeps.outcomes = {("tiny", 2): crash}
    assert in_another_process(sweeps.make) == 9
    assert sweeps.report()["running"]["batch-size"] == 2
    sweeps.outcomes = {}
    sweeps.make(resume=True)
    assert sweeps.made == [*TABLE[2:], TABLE[1]]
    assert list(sweeps.statuses()) == TABLE


def test_another_file_meanwhile(sweeps, capsys):
    """Rows are matched by their options, however they are spelled."""
    sweeps.file.write_text(GRID.replace("[1, 2, 4]", "[1, 2]"))
    sweeps.make()
    sweeps.file.write_text(
        "device: cpu\nruns:\n- {model: tiny, micro-batch: [2, 8], watchdog: 9}\n"
    )
    sweeps.file.write_text(sweeps.file.read_text().replace("micro-batch", "batch_size"))
    sweeps.made.clear()
    sweeps.make(resume=True)
    assert sweeps.made == [("tiny", 8)]
    assert "1 of 2 runs are done; 3 runs of the report are not in this sweep, and stay" in (
        capsys.readouterr().err
    )
    strangers = [("tiny", 1), ("tiny-gpt2", 1), ("tiny-gpt2", 2)]
    assert list(sweeps.statuses()) == [("tiny", 2), ("tiny", 8), *strangers]


def test_other_versions_and_devices(sweeps, capsys):
    sweeps.file.write_text(GRID.replace("[1, 2, 4]", "1"))
    sweeps.make()
    sweeps.file.write_text(GRID)
    sweeps.machine = MACHINE | {"versions": {"llmq": "0.2", "NumPy": "2"}}
    sweeps.make(resume=True)
    warning = "warning: --resume: earlier runs are of other versions (llmq 0.1, 0.2)"
    assert capsys.readouterr().err.count(warning) == 1
    heading = sweeps.text("md").splitlines()[2:5]
    assert [line[:15] for line in heading[:2]] == ["1. `llmq bench`", "2. `llmq bench`"]
    assert heading[0].endswith("steps, llmq 0.1; NumPy 2")
    assert heading[1].endswith("steps, llmq 0.2; NumPy 2")
    sweeps.machine = MACHINE | {"device": "NVIDIA H200"}
    before = sweeps.report()
    with pytest.raises(
        ConfigError, match=r"--resume: .* \(device CPU, NVIDIA H200; .*another --out"
    ):
        sweeps.make(resume=True)
    assert sweeps.report() == before


def test_retry_wants_resume(sweeps):
    with pytest.raises(ConfigError, match=r"--retry: .*: give --resume, too"):
        sweeps.make(retry=True)
    assert sweeps.made == []


def test_two_drivers_do_not_share_a_report(sweeps):
    def second(options):
        sweeps.outcomes = {}
        with pytest.raises(LlmqError, match=r"--out: .*out\.json' is in use by process"):
            sweeps.make(resume=True)
        return ok(options)

    sweeps.outcomes = {("tiny", 2): second}
    sweeps.make()
    assert sweeps.made == TABLE


# -- kills ---------------------------------------------------------------------------------------


def in_another_process(work, *args) -> int:
    """The process's exit status, or the negative number of the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(monkeypatch, moment: int) -> list[int]:
    """From now on the moment-th operation on a file is the last one of the process, done or not;
    returns a list that counts them."""
    count = [0]

    def counting(operation):
        def counted(*args, **kwargs):
            count[0] += 1
            if count[0] == moment and moment % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*args, **kwargs)
            if count[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    for name in ("open", "fsync", "replace"):
        monkeypatch.setattr(files.os, name, counting(getattr(os, name)))
    return count


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_to_the_same_table(sweeps, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        count = killed_at(patch, 0)
        sweeps.make()
    table, rng = sweeps.table(), random.Random(20)
    moments = sorted(rng.sample(range(1, count[0] + 1), 10))
    finished = []
    for moment in moments:
        for path in tmp_path.glob("out.*"):
            path.unlink()

        def killed(moment=moment):
            killed_at(monkeypatch, moment)
            sweeps.make()

        assert in_another_process(killed) == -signal.SIGKILL
        there = sweeps.report()["runs"] if sweeps.out.with_name("out.json").exists() else []
        sweeps.made.clear()
        sweeps.make(resume=True)
        assert len(sweeps.made) == len(TABLE) - len(there)  # nothing that is on the disk again
        assert sweeps.table() == table
        kept = {str(run["options"]): run | {"invocation": 0} for run in sweeps.report()["runs"]}
        assert all(kept[str(run["options"])] == run | {"invocation": 0} for run in there)
        finished.append(len(there))
    assert min(finished) <= 1 and max(finished) >= 5, "kills come early and late"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_a_child_ends_with_its_parent(tmp_path):
    """A child that outlives its parent would keep the GPU from the sweep that goes on."""
    code = (
        "import os, sys, time; from llmq.bench.child import end_with; end_with(int(sys.argv[1])); "
        "os.write(int(sys.argv[2]), b'x'); time.sleep(60)"
    )
    reading, writing = os.pipe()

    def parent():
        os.set_inheritable(writing, True)
        args = [sys.executable, "-c", code, str(os.getpid()), str(writing)]
        os.spawnv(os.P_NOWAIT, sys.executable, args)
        os.read(reading, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_another_process(parent) == -signal.SIGKILL
    os.close(writing)
    assert select.select([reading], [], [], 20)[0], "it goes on"
    assert os.read(reading, 1) == b""  # the end: nobody has the other end any more
    os.close(reading)
    # One whose parent has gone already ends at once.
    assert in_another_process(child.end_with, 1) == 1


# -- the plan ------------------------------------------------------------------------------------


def test_what_does_not_fit_is_left_out_and_the_fastest_comes_first(sweeps, capsys):
    speeds = dict(zip(TABLE, (3, 1, 2, 6, 5, 4), strict=True))
    sweeps.predictions = {name: planned(speed) for name, speed in speeds.items()}
    sweeps.predictions["tiny", 1] = planned(9.0, fits=False)
    sweeps.predictions["tiny", 2] = {"status": "failed", "message": "no idea"}
    order = [("tiny-gpt2", 1), ("tiny-gpt2", 2), ("tiny-gpt2", 4), ("tiny", 4), ("tiny", 2)]
    sweeps.outcomes = {("tiny-gpt2", 4): stop}
    with pytest.raises(KeyboardInterrupt):
        sweeps.make(plan_first=True)
    sweeps.outcomes = {}
    sweeps.make(plan_first=True, resume=True)
    assert sweeps.made == [*order[:2], order[2], *order[2:]]
    assert list(sweeps.statuses()) == [("tiny", 1), *order]
    (left_out,) = (run for run in sweeps.report()["runs"] if run["status"] == "does not fit")
    assert left_out["planned"] == {"device": 90 << 20, "host": 1 << 20}
    why = "does not fit: out of memory: 90 MiB are needed, 80 MiB are available (planned)"
    assert f"- tiny bf16 1 x 4: {why}" in sweeps.text("md")
    assert why in capsys.readouterr().err


def test_without_plan_first_the_file_says_the_order(sweeps):
    """And what the plan takes for too much is tried."""
    sweeps.predictions = {name: planned(n + 1.0, fits=False) for n, name in enumerate(TABLE)}
    sweeps.make()
    assert sweeps.made == TABLE


def test_the_time_that_a_run_may_take(sweeps):
    sweeps.predictions = {("tiny", 1): planned(32.0), ("tiny", 2): planned(32.0, on_gpu=False)}
    sweeps.make(steps=2, repeats=3)
    steps = child.WARM_UP + 2 * 3
    assert sweeps.timeouts == [bench.PATIENCE + bench.SLOWER * 2.0 * steps, 0, 0, 0, 0, 0]
    sweeps.timeouts.clear()
    sweeps.make(timeout=7.0, overwrite=True)
    assert sweeps.timeouts == [7.0] * 6


def test_time_left_is_said_and_known_again_after_an_interruption(sweeps, monkeypatch, capsys):
    seconds = iter(range(0, 10_000, 50))  # a run takes 50 s
    monkeypatch.setattr(bench.time, "monotonic", lambda: float(next(seconds)))
    sweeps.predictions = {name: planned(64.0, on_gpu=False) for name in TABLE}
    sweeps.outcomes = {("tiny", 4): stop}
    with pytest.raises(KeyboardInterrupt):
        sweeps.make()
    said = capsys.readouterr().err
    assert "[1/6] tiny bf16 1 x 4 ...\n" in said
    assert "[2/6] tiny bf16 2 x 4, about 4 min left ...\n" in said
    sweeps.outcomes = {}
    sweeps.make(resume=True)
    assert "[3/6] tiny bf16 4 x 4, about 3 min left ...\n" in capsys.readouterr().err


def test_a_planner_that_dies_is_no_reason_to_stop(monkeypatch, capfd):
    monkeypatch.setattr(child, "CHILD", (sys.executable, "-c", "raise SystemExit(3)"))
    runs, machine = bench.predict([{}, {}])
    assert (runs, machine) == ([{}, {}], None)
    assert "warning: the runs cannot be planned: the process that does it ended with 3" in (
        capfd.readouterr().err
    )


def test_a_run_that_cannot_be_planned_is_told_before_the_first_one(sweeps, capsys):
    wrong = {"status": "failed", "message": "no preset is called 'tinny'"}
    sweeps.predictions = {("tiny-gpt2", 1): wrong, ("tiny-gpt2", 4): wrong}
    sweeps.make()
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [
        "warning: 2 of 6 runs cannot be planned, and will hardly run; the first is tiny-gpt2 bf16 "
        "1 x 4: no preset is called 'tinny'",
        "[1/6] tiny bf16 1 x 4 ...",
    ]
    assert sweeps.made == TABLE, "they say themselves why"


TINY = {"model": "tiny", "from-scratch": True, "device": "cpu", "model-dtype": "fp32"}
TINY |= {"batch-size": 1, "seq-len": 16, "grad-accumulation": 1}


def test_plans_of_runs(tmp_path):
    """The records of runs that fit, do not fit, and cannot be planned."""
    noted = []
    job = child.Job(note=noted.append, alive=tmp_path / "alive")
    measure.plans(job, runs=[TINY, TINY | {"memory-limit": "1MiB"}, TINY | {"seq-len": 4096}])
    assert job.alive.exists()
    (written,) = noted
    found, none, wrong = written["runs"]
    assert (found["status"], found["message"], found["on_gpu"]) == ("fits", None, False)
    assert found["tokens_per_second"] == pytest.approx(16 / found["step_seconds"])
    assert none["status"] == "does not fit" and none["device"] == found["device"]
    assert (
        none["message"].startswith("out of memory: ") and "1 MiB are available" in none["message"]
    )
    assert wrong["status"] == "failed" and "exceeds the model's 1024 positions" in wrong["message"]
    assert written["machine"]["device"] == "CPU" and "llmq" in written["machine"]["versions"]


def test_a_sweep_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Real children: the plan that leaves a run out is that of the run that is made."""
    text = "device: cpu\nmodel: tiny\nmodel-dtype: fp32\ngrad-accumulation: 1\nseq-len: 16\n"
    text += "memory-limit: [1MiB, 1GiB]\nbatch-size: 1\n"
    (tmp_path / "sweep.yaml").write_text(text)
    arguments = ["bench", "--config", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "s")]
    assert _run([*arguments, "--timed-steps=1", "--repeats=1", "--plan-first"]) == 0
    printed = capsys.readouterr()
    assert "- tiny fp32 1 x 1 --memory-limit=1MiB: does not fit: out of memory: " in printed.out
    assert "1 MiB are available" in printed.out and "(planned)" in printed.out
    assert "[2/2] tiny fp32 1 x 1 --memory-limit=1GiB ...\n  ok: " in printed.err
    left_out, made = json.loads((tmp_path / "s.json").read_text())["runs"]
    assert made["result"]["memory"]["planned"] == left_out["planned"]["device"]
