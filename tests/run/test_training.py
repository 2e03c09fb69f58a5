"""`llmq train` from its command line: the loop, resuming, signals, reports, hopeless runs."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from rich.console import Console

from llmq.base.errors import LlmqError
from llmq.base.locks import locked
from llmq.checkpoint.checkpoint import required_groups
from llmq.data.epoch_plan import Permutation
from llmq.data.tokens import TokenWriter
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.plan.sol import peaks
from llmq.report import live
from llmq.report.json_log import JsonLog
from llmq.run import sensors, training
from llmq.run.diagnose import MAX_SKIPPED
from llmq.run.ranks import Rounds
from llmq.run.trainer import Trainer
from llmq.runtime.gpu_info import GpuInfo
from llmq.runtime.host_device import HostDevice
from llmq.runtime.host_usage import HostUsage
from llmq.state.rules.adamw import AdamW
from tests.fake_nvml import FAKE_UUID, FakeGpu, fake_sensors
from tests.runs import (
    VOCAB,
    T,
    at_step,
    flags,
    make_workplace,
    options,
    records,
    signal_after,
    train,
    write_tokens,
)
from tests.without_cuda import WITHOUT_CUDA

STEPS = 12  # more than two epochs
STATE = [f"{group}.shard_000_of_001.safetensors" for group in required_groups(AdamW)]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """The current folder; each run in it has a new log unless it says otherwise."""
    monkeypatch.chdir(make_workplace(tmp_path))


def measured(log="log.json"):
    """Everything that a step measures but times, by step; the last record counts."""
    times = ("time", "duration_ms", "communication")
    return {r["step"]: {k: v for k, v in r.items() if k not in times} for r in records("step", log)}


def digests(folder, names):
    return {name: hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest() for name in names}


# ------------------------------------------------------------------------------------------------
# Resuming

OPTION_SETS = {
    "fp32": {},
    "bf16": {"model_dtype": "bf16", "opt_m_dtype": "bf16", "opt_v_dtype": "bf16"},
    "bf16_fp32_master": {
        "model_dtype": "bf16",
        "master_dtype": "fp32",
        "grad_accum_dtype": "fp32",
        "grad_accumulation": 3,
    },
}


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
def test_resumed_runs_are_bitwise_equal(options, monkeypatch):
    """Interrupted in the second of three epochs; and gone on from a checkpoint in the middle."""
    options = {**options, "steps": STEPS, "save_training_state": True}
    whole = {
        **options,
        "log_file": "whole.json",
        "out_dir": "whole",
        "checkpoint_dir": "whole-ckpt",
    }
    assert train(**whole, ckpt_interval=5) == 0

    with monkeypatch.context() as patch:
        signal_after(patch, 7)
        assert train(**options) == 130
    assert sorted(os.listdir("ckpt")) == ["step_00000008"]
    assert not Path("out").exists()
    assert sorted(measured()) == list(range(8))
    assert train(**options, **{"continue": ""}) == 0
    assert measured() == measured("whole.json")
    assert len(measured()) == STEPS

    middle = {"log_file": "middle.json", "out_dir": "middle", "checkpoint_dir": "middle-ckpt"}
    assert train(**options, **middle, **{"continue": "whole-ckpt/step_00000005"}) == 0
    resumed = measured("middle.json")
    assert sorted(resumed) == list(range(5, STEPS))
    assert all(measured("whole.json")[step] == record for step, record in resumed.items())

    last = f"step_{STEPS:08d}"
    for out, ckpt in (("out", "ckpt"), ("middle", "middle-ckpt")):
        files = ["model.safetensors", "config.json"]
        assert digests(out, files) == digests("whole", files)
        assert digests(f"{ckpt}/{last}", STATE) == digests(f"whole-ckpt/{last}", STATE)
    ends = [records("eval", log)[-1]["loss"] for log in ("log.json", "middle.json", "whole.json")]
    assert ends == [ends[0]] * 3


def test_what_continue_names(capsys):
    assert train(steps=6, ckpt_interval=2) == 0
    assert sorted(os.listdir("ckpt")) == ["step_00000002", "step_00000004"]
    whole = measured()
    for spec, first in (("", 4), ("ckpt", 4), ("2", 2), ("ckpt/step_00000002", 2)):
        assert train(steps=6, log_file="again.json", **{"continue": spec}) == 0
        again = measured("again.json")
        assert {s: r for s, r in whole.items() if s >= first} == again
        os.remove("again.json")
    out = capsys.readouterr().out
    assert "Loading checkpoint 2 from `ckpt` ...\n  done in " in out
    assert "\n4 of these steps are done already\n" in out


def test_a_renamed_checkpoint_is_continued(capsys):
    assert train(steps=2, ckpt_interval=1) == 0
    os.rename("ckpt/step_00000001", "step_best")
    assert train(steps=2, log_file="again.json", **{"continue": "step_best"}) == 0
    assert measured("again.json") == {1: measured()[1]}
    assert f"Loading checkpoint best from `{os.getcwd()}` ..." in capsys.readouterr().out


def test_continue_without_a_checkpoint(capsys):
    """The newest of none is a fresh start, as restarting jobs want it; a named one is an error."""
    assert train(steps=1, **{"continue": ""}) == 0
    assert "warning: --continue: no complete checkpoint in 'ckpt'" in capsys.readouterr().err
    os.remove("log.json")
    for spec in ("3", "elsewhere", "ckpt/step_00000003"):
        assert train(steps=1, **{"continue": spec}) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: --continue {spec}: no complete checkpoint")
        assert not Path("log.json").exists()


def test_new_data_starts_the_data_anew(capsys):
    assert train(steps=3, save_training_state=True) == 0
    first_batch = measured()[0]
    write_tokens(Path("data/train-3.bin"), 8, seed=7)
    resume = {"steps": 4, "continue": ""}
    assert train(**resume) == 2
    assert "training files changed since the checkpoint" in capsys.readouterr().err
    assert train(**resume, new_data="", log_file="new.json") == 0
    dataset = records("dataset", "new.json")[0]
    assert (dataset["file_index"], dataset["chunk_index"]) == (0, 0)
    os.remove("data/train-3.bin")
    # With the old files: the first batch again, but with trained weights.
    assert train(**resume, new_data="", log_file="again.json") == 0
    again = measured("again.json")[3]
    assert again["step_tokens"] == first_batch["step_tokens"]
    assert again["loss"] != first_batch["loss"]
    position = records("dataset", "again.json")[0]
    assert (position["file_index"], position["chunk_index"]) == (0, 0)
    assert train(**resume, log_file="old.json") == 0
    position = records("dataset", "old.json")[0]
    assert (position["file_index"], position["chunk_index"]) != (0, 0)


def test_the_order_of_the_data_is_kept(capsys):
    assert train(steps=4, ckpt_interval=2, train_seed=1) == 0
    whole = measured()
    assert capsys.readouterr().err == ""
    assert train(steps=4, train_seed=2, log_file="again.json", **{"continue": ""}) == 0
    assert measured("again.json") == {step: whole[step] for step in (2, 3)}
    assert capsys.readouterr().err == (
        "warning: --train-seed=2 has no effect: the data goes on in the order of the checkpoint's "
        "run (1); --new-data starts it anew\n"
    )
    new = {"log_file": "new.json", "new_data": "", "continue": ""}
    assert train(steps=4, train_seed=2, **new) == 0
    assert measured("new.json") != measured("again.json")
    assert "--train-seed is 2, in the checkpoint's run it was 1" in capsys.readouterr().err


def test_the_seed_of_the_data_is_not_that_of_the_last_options(capsys):
    again = {"ckpt_interval": 2, "log_file": "again.json", "continue": ""}
    assert train(steps=3, ckpt_interval=2, train_seed=1) == 0
    assert train(steps=5, train_seed=2, **again) == 0
    assert "--train-seed=2 has no effect" in capsys.readouterr().err
    assert train(steps=7, train_seed=1, **again) == 0
    assert capsys.readouterr().err == ""


def test_a_continued_run_reports_what_the_whole_one_does(capsys):
    """The mean training loss since the last validation; what outliers are measured by."""

    def validations():
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[V]")]
        return [re.search(r"eval .* train +\S+", line)[0] for line in lines]

    options = {"eval_every_n_steps": 5, "save_training_state": True}
    assert train(steps=8, **options) == 0
    whole = validations()
    assert train(steps=3, **options, checkpoint_dir="again", log_file="again.json") == 0
    capsys.readouterr()
    again = {"checkpoint_dir": "again", "log_file": "again.json", "continue": ""}
    assert train(steps=8, **options, **again) == 0
    assert validations() == whole and len(whole) == 2
    manifest = json.loads(Path("again/step_00000008/checkpoint.json").read_text())
    losses = [record["loss"] for record in records("step")]
    assert manifest["run"]["state"]["history"]["guard"]["losses"] == [*map(list, enumerate(losses))]


def test_a_continued_log_goes_on_and_a_new_one_replaces():
    options = {"steps": 4, "ckpt_interval": 2, "save_training_state": True}
    assert train(**options) == 0
    assert train(**options, **{"continue": "2"}) == 0
    assert [r["step"] for r in records("step")] == [0, 1, 2, 3, 2, 3]
    assert train(**options) == 0
    assert [r["step"] for r in records("step")] == [0, 1, 2, 3]


def test_a_log_outlives_continue_without_a_checkpoint():
    assert train(steps=2) == 0
    assert train(steps=2, **{"continue": ""}) == 0
    assert [r["step"] for r in records("step")] == [0, 1, 0, 1]


@pytest.mark.parametrize("stop", [3, 4])
def test_an_interrupted_run_makes_up_for_its_evaluation(stop, monkeypatch):
    """An evaluation was due where the run stopped: every 4 steps, and after an epoch of 5."""
    assert train(steps=8, eval_every_n_steps=4, log_file="whole.json", out_dir="whole") == 0
    with monkeypatch.context() as patch:
        signal_after(patch, stop)
        assert train(steps=8, eval_every_n_steps=4) == 130
    assert train(steps=8, eval_every_n_steps=4, **{"continue": ""}) == 0
    losses, whole = ([(r["step"], r["loss"]) for r in records("eval", log)]
                     for log in ("log.json", "whole.json"))  # fmt: skip
    assert losses == whole
    assert [step for step, _ in whole] == [4, 5, 8]


def test_a_run_that_is_killed_while_it_evaluates_does_so_again(monkeypatch):
    """The evaluation is neither lost nor made twice, where a checkpoint is due at the same step."""
    options = {"steps": 5, "eval_every_n_steps": 2, "ckpt_interval": 2}
    with monkeypatch.context() as patch:
        real = Trainer.validate

        def killed(self, *args):
            if self.steps_done == 4:
                raise KeyboardInterrupt
            return real(self, *args)

        patch.setattr(Trainer, "validate", killed)
        assert train(**options) == 130
    assert train(**options, **{"continue": ""}) == 0
    assert [r["step"] for r in records("eval")] == [2, 4, 5]
    assert train(**options, **{"continue": "4"}) == 0
    assert [r["step"] for r in records("eval")] == [2, 4, 5, 5]


def test_two_runs_do_not_share_what_they_write(capsys):
    """The second is refused before it touches anything; what a dead process left does not count."""
    assert train(steps=1, save_training_state=True) == 0
    before = Path("log.json").read_text()
    beside = {"out-dir": ".out.llmq-lock", "log-file": ".log.json.llmq-lock"}
    locks = {"checkpoint-dir": "ckpt/.llmq-lock"} | beside
    for flag, lock in locks.items():
        with locked(Path(lock), f"--{flag}", Path(flag)):
            assert train(steps=2, **{"continue": ""}) == 2
        err = capsys.readouterr().err
        assert re.fullmatch(
            rf"error: --{flag}: '.*' is in use by process {os.getpid()} on .*\n", err
        )
        assert Path("log.json").read_text() == before
        Path(lock).write_text("llmq: process 1 on elsewhere\n")
    assert train(steps=2, **{"continue": ""}) == 0
    assert sorted(os.listdir()) == ["ckpt", "data", "log.json", "model", "out"]
    assert os.listdir("ckpt") == ["step_00000001"]


def test_runs_may_share_a_device_as_their_log():
    assert train(steps=1, log_file="/dev/null") == 0
    assert not Path("/dev/.null.llmq-lock").exists()


def test_a_finished_run_only_evaluates_and_exports_again(monkeypatch):
    assert train(steps=2, save_training_state=True) == 0
    before = digests("out", ["model.safetensors"])
    shutil.rmtree("out")
    assert train(steps=2, log_file="again.json", **{"continue": ""}) == 0
    assert digests("out", ["model.safetensors"]) == before
    assert records("step", "again.json") == []
    assert records("eval", "again.json")[0]["loss"] == records("eval")[0]["loss"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_with_more_steps_than_it_needs_says_so(monkeypatch, capsys, terminal):
    assert train(steps=4, save_training_state=True) == 0
    shutil.rmtree("out")
    capsys.readouterr()
    console = Console(force_terminal=True, _environ={"TERM": "xterm"}) if terminal else Console()
    monkeypatch.setattr(live, "printable_console", lambda: console)
    assert train(steps=2, save_training_state=True, **{"continue": ""}) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\nNothing left to train: the run has 2 steps, 4 are done; raise --steps or --e" in out
    assert "Starting" not in out and "done already" not in out and "nan" not in out
    validation = r"^\[V\] step     4 \[80.0%\] \| .* \| eval +[\d.]+ \| train +[\d.]+ \| tps +\S+ "
    validation += r"\| run 100.0%$"
    assert re.search(validation, out, re.M)
    assert "4/2" not in out
    assert Path("out/model.safetensors").is_file()
    assert os.listdir("ckpt") == ["step_00000004"]


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def hangup():
    """SIGHUP ends processes, though the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_finishes_the_step_and_saves(signum, monkeypatch, capsys, hangup):
    handlers = [signal.getsignal(s) for s in SIGNALS]
    signal_after(monkeypatch, 2, signum)
    assert train(steps=5) == 128 + signum
    assert os.listdir("ckpt") == ["step_00000003"]
    out, err = capsys.readouterr()
    assert out.endswith(f"Stopped by {signum.name} after 3 steps; go on with --continue\n")
    assert err == ""
    assert records("info")[-1]["message"].startswith("Stopped by")
    assert [signal.getsignal(s) for s in SIGNALS] == handlers


def test_a_lost_terminal_sends_its_signal_twice(monkeypatch, hangup):
    """The shell and the system each do; the second one must not stop the saving."""
    signal_after(monkeypatch, 2, signal.SIGHUP)
    real = Trainer.save

    def save(self):
        os.kill(os.getpid(), signal.SIGHUP)
        return real(self)

    monkeypatch.setattr(Trainer, "save", save)
    assert train(steps=5) == 128 + signal.SIGHUP
    assert os.listdir("ckpt") == ["step_00000003"]


def test_nohup_is_respected(monkeypatch, hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal_after(monkeypatch, 2, signal.SIGHUP)
    assert train(steps=5) == 0
    assert len(records("step")) == 5


@pytest.mark.parametrize("first", [0, 2])
def test_a_signal_saves_though_nobody_reads_the_console(first, monkeypatch):
    """Ctrl-C ends `| tee`, too; `| head` has gone before."""
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    signal_after(monkeypatch, 2)
    at_step(monkeypatch, first, lambda loop: os.close(reader))
    assert train(steps=5) == 130
    sys.stdout.close()
    assert os.listdir("ckpt") == ["step_00000003"]
    assert [r["step"] for r in records("step")] == [0, 1, 2]


def test_products_are_logged_after_the_first_step(monkeypatch):
    monkeypatch.setattr(HostDevice, "fast_products", lambda self: {"a product": True})
    monkeypatch.setattr(HostDevice, "choices", lambda self: {"a product": "a way"})
    assert train(steps=3, save_training_state=True) == 0
    (record,) = records("fast-products")
    assert (record["step"], record["fast_products"]) == (0, {"a product": True})
    assert train(steps=5, **{"continue": ""}) == 0
    assert [record["step"] for record in records("fast-products")] == [0, 3]
    assert [(r["step"], r["choices"]) for r in records("choices")] == [
        (step, {"a product": "a way"}) for step in (0, 3)
    ]


@pytest.mark.parametrize("gpus", [1, 3])
def test_a_signal_in_the_last_evaluation_saves(gpus, monkeypatch, capsys):
    """A checkpoint is saved whatever --save-training-state is; the export follows on --continue."""
    taken, real = [], Rounds._another

    def another(self, rank):
        taken.append(rank)
        if len(taken) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, rank)

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "_another", another)
        assert train(steps=3, gpus=gpus, grad_accumulation=1) == 128 + signal.SIGTERM
    assert os.listdir("ckpt") == ["step_00000003"] and not Path("out").exists()
    out = capsys.readouterr().out
    assert out.endswith("Stopped by SIGTERM after 3 steps; go on with --continue\n")
    assert train(steps=3, gpus=gpus, grad_accumulation=1, **{"continue": ""}) == 0
    assert Path("out/model.safetensors").is_file()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_acts_at_once(first, monkeypatch):
    signal_after(monkeypatch, 1, first)

    def impatient(self):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "save", impatient)
    assert train(steps=5) == 130
    assert not Path("ckpt").exists()


# ------------------------------------------------------------------------------------------------
# Reports


def test_console_says_what_happens_in_its_order(capsys):
    """Evaluations: every 4 steps, at the new epoch (step 5), at the end."""
    options = {"steps": 6, "ckpt_interval": 2, "ckpt_keep_n": 1, "save_training_state": True}
    assert train(**options, eval_every_n_steps=4, eval_num_steps=2, log_gpu_util=0) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = re.findall(r"^(?:\[[A-Z][\w ]+\]|\[[TV]\] step +\d|saving|Done|Saving|Next)", out, re.M)
    assert [re.sub(r"\[([TV])\] step +", r"\1", line) for line in lines] == [
        *("[System 0]", "[Dataset]", "[Options]", "[Allocator State]"),
        *("T0", "T1", "saving", "T2", "T3", "V4", "saving", "T4", "V5", "T5", "saving", "V6"),
        *("Done", "Saving", "Next"),
    ]
    left = [f"step_{step:08d}" for step in (2, 4, 6)]  # 2 is about to be a good one
    assert sorted(os.listdir("ckpt")) == left, "after 4 there was a good step"


def test_no_validation(capsys):
    """Nothing is opened, nothing is said of it; checkpoints, continuing and export are as ever."""
    os.remove("data/eval.bin")
    none = {"eval_file": "none", "eval_every_n_steps": 2, "ckpt_interval": 3}
    assert train(steps=6, **none) == 0
    out, err = capsys.readouterr()
    assert err == "warning: --eval-every-n-steps=2 has no effect without --eval-file\n"
    assert "[V]" not in out and "eval:" not in out
    assert "\nDone. No validation\nSaving model to `out` ...\n" in out
    assert records("eval") == []
    assert [r["split"] for r in records("dataset")] == ["train"]
    assert Path("out/model.safetensors").is_file()
    whole = measured()
    assert train(steps=6, **none, log_file="again.json", **{"continue": "3"}) == 0
    assert measured("again.json") == {step: whole[step] for step in (3, 4, 5)}
    write_tokens(Path("data/eval.bin"), 7, seed=99)
    assert train(steps=6, log_file="with.json") == 0
    assert measured("with.json") == whole, "training is the same"


def test_a_trainer_without_validation():
    given = {n.replace("-", "_"): v for n, v in options(eval_file="none", steps=1).items()}
    with Trainer(**given) as trainer:
        trainer.step()
        with pytest.raises(LlmqError, match="--eval-file: none: there is nothing to validate on"):
            trainer.validate()


FIELDS = {
    "cmd": "run cmd resumed_at",
    "option": "name value",
    "dataset": "split files tokens file_index chunk_index seed order",
    "allocator": "stats",
    "step": "step_tokens trained_tokens epoch duration_ms norm loss lr lse_max lse_mean loss_1k "
    "saturated",
    "eval": "eval_tokens duration_ms loss loss_1k",
}


def test_log_has_the_records_of_llmq():
    options = {"steps": 3, "warmup": 2, "ckpt_interval": 2, "log_gpu_util": 0}
    assert train(**options, eval_every_n_steps=2, eval_num_steps=2) == 0
    log = json.loads(Path("log.json").read_text())
    kinds = {r["log"] for r in log}
    assert kinds == {*FIELDS, "info"}, "gpu-model and sol need a GPU, gpu and cpu --log-gpu-util"
    for record in log:
        assert list(record)[:3] == ["log", "time", "step"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{9}", record["time"])
        if record["log"] in FIELDS:
            assert [*record][3:] == FIELDS[record["log"]].split()
        else:
            assert record["type"] == "message"
            assert set(record) <= {"log", "time", "step", "type", "message", "duration_ms"}
    options = {r["name"]: r["value"] for r in log if r["log"] == "option"}
    assert (options["total-batch"], options["steps-per-epoch"]) == (2 * 2 * T, 5)
    assert (options["steps"], options["arch"], options["model-dtype"]) == (3, "Qwen3", "F32")
    train_set, eval_set = (r for r in log if r["log"] == "dataset")
    assert train_set["files"] == [f"data/train-{i}.bin" for i in range(3)]
    assert (eval_set["split"], eval_set["tokens"]) == ("eval", 113)
    (allocator,) = (r["stats"] for r in log if r["log"] == "allocator")
    assert all(
        list(row) == ["name", "device", "managed", "pinned", "pageable"] for row in allocator
    )
    steps = [r for r in log if r["log"] == "step"]
    assert [r["step"] for r in steps] == [0, 1, 2]
    assert [r["lr"] for r in steps] == [0.0, 5e-3, 1e-2]
    assert {r["step_tokens"] for r in steps} == {2 * 2 * T}
    periodic, final = (r for r in log if r["log"] == "eval")
    assert (periodic["step"], periodic["eval_tokens"]) == (2, 2 * 2 * T)
    assert (final["step"], final["eval_tokens"]) == (3, 7 * T)
    messages = [r["message"] for r in log if r["log"] == "info"]
    assert messages[-2] == f"Done. validation loss {final['loss']:10f}"
    assert messages[-1] == "Saving model to `out`"


def test_terminal_gets_the_live_view(monkeypatch, capsys):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    monkeypatch.setattr(live, "printable_console", lambda: console)
    assert train(steps=2) == 0
    assert "[T] step     1" in screen.getvalue()
    assert "step 2/2" in screen.getvalue()
    assert " cores  memory " in screen.getvalue() and "[G]" not in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue(), "the cursor is back"
    assert "[T]" not in capsys.readouterr().out


class GpuLike(HostDevice):
    """The CPU, to whom a run reports as to a GPU: with sensors, and one step late."""

    kind, index = "cuda", 0

    def __init__(self, sizes, **ranks):
        super().__init__(sizes, **ranks)
        self.spec = replace(self.spec, name="NVIDIA GeForce RTX 3060", memory=80_000 << 20)


GPU = GpuInfo(
    name="NVIDIA GeForce RTX 3060", bus_id="0000:19:00.0", sm_count=132, major=9, minor=0,
    memory=80_000 << 20, free=70_000 << 20, l2_size=50 << 20, shared_mem=228 << 10, ecc=True,
    cuda_driver=13000, cuda_runtime=12090,
)  # fmt: skip


def test_reports_of_a_gpu(monkeypatch, capsys):
    options = {"steps": 6, "ckpt_interval": 3, "eval_every_n_steps": 2, "log_gpu_util": 4}
    assert train(**options, log_file="cpu.json") == 0
    capsys.readouterr()
    nvml = fake_sensors(monkeypatch, FakeGpu(power=7000, reserved=500 << 20))
    monkeypatch.setattr("llmq.runtime.machine.HostDevice", GpuLike)
    monkeypatch.setattr(training, "gpu_info", lambda index: GPU)
    monkeypatch.setattr(training, "measured_peak", lambda dev: 0.8 * peaks(GPU.name)[1])
    assert train(**options) == 0
    out = capsys.readouterr().out
    assert measured() == measured("cpu.json")
    assert [r["loss"] for r in records("eval")] == [r["loss"] for r in records("eval", "cpu.json")]
    assert "sensors" not in [thread.name for thread in threading.enumerate()]
    assert nvml.listening == 0
    assert (
        "\n[System 0]\n  Device 0: NVIDIA GeForce RTX 3060\n"
        "  CUDA version: driver 13.0, runtime 12.9\n  Memory: 10000 MiB / 80000 MiB\n\n"
        "[Speed of Light]\n  Peak TF32:     12.7 TFLOP/s\n"
        "  Benchmark:    80.0%         of spec sheet\n"
    ) in out
    assert "              Free:  70000 |       0 |      0 \n" in out
    assert "          Reserved:    500 |       0 |      0 \n" in out
    assert "             Other:   9999 |       0 |      0 \n" in out  # 10000, less our own
    # Checkpoints and evaluations wait for the step that is under way.
    order = re.findall(r"^(\[[TV]\] step +\d|saving)", out, re.MULTILINE)
    assert [re.sub(r"\W+|step", "", entry) for entry in order] == (
        "T0 T1 V2 T2 saving T3 V4 T4 V5 T5 V6".split()
    )
    assert re.search(r"\[T\] step     1 .* \| tps +[\d-]+ \| sol \d+\.\d% \| run \S+\n", out)
    (model,) = records("gpu-model")
    assert (model["rank"], model["id"], model["uuid"]) == (0, 0, FAKE_UUID)
    assert {"name", "l2_size", "sm_count", "major", "minor", "memory", "free", "reserved", "ecc",
            "shared_mem", "cuda_driver", "cuda_runtime"} <= set(model)  # fmt: skip
    (sol,) = records("sol")
    assert {"rank", "blocks", "lm_head", "attention", "tps", "tf32_peak", "bf16_peak", "fp16_peak",
            "fp8_peak"} <= set(sol)  # fmt: skip
    assert [(r["step"], r["power"]) for r in records("gpu")] == [(0, 7000), (4, 7000)]
    assert re.search(
        r"\n\[G\] step     4 \[gpu  0\] \| use 98\^98% \| mem .* \| power 7\^7/700 W", out
    )


def test_no_sensors_are_read_where_none_are_wanted(monkeypatch, capsys):
    monkeypatch.setattr(sensors, "open_sensors", None)
    assert train(steps=1, log_gpu_util=0) == 0
    assert "[G]" not in capsys.readouterr().out
    assert records("cpu") == []


def test_reports_of_the_cpu(monkeypatch, capsys):
    read = HostUsage.read
    monkeypatch.setattr(HostUsage, "read", lambda self: read(self) | {"util": 30})
    assert train(steps=3, log_gpu_util=2) == 0
    assert len(re.findall(r"\n\[G\] step     [02] \[cpu\] \| use ", capsys.readouterr().out)) == 2
    first, last = records("cpu")
    assert (first["step"], last["step"], last["rank"]) == (0, 2, 0)
    assert 0 < last["memory_used"] <= last["memory_used_max"] <= last["memory_total"]


def test_an_error_of_the_gpu_is_told_with_the_error_that_it_makes(monkeypatch, capsys):
    nvml = fake_sensors(monkeypatch)
    monkeypatch.setattr("llmq.runtime.machine.HostDevice", GpuLike)
    monkeypatch.setattr(training, "gpu_info", lambda index: GPU)
    monkeypatch.setattr(training, "measured_peak", lambda dev: None)

    def fail(self, step, *args):
        nvml.gpus[0].xids.append(79)
        raise LlmqError("the GPU has gone")

    monkeypatch.setattr(Step, "train", fail)
    assert train(steps=2) == 2
    assert capsys.readouterr().err == (
        "error: the GPU has gone\nGPU 0: Xid 79, the GPU has fallen off the bus\n"
    )


def test_useless_flag_is_said_to_be(capsys):
    assert train(steps=1, debug_time_breakdown=True, debug_log_allocations=0) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"Timing breakdown:\n(  fwd +[\d.]+ms, head +[\d.]+ms, bwd +[\d.]+ms\n)+  opt +[\d.]+ms\n",
        out,
    )
    assert re.search(r"\[Allocations\]\n(GPU |HOST)  +\w+ - +[\w.]+: +0 MiB\n", out)


def test_a_calibration_is_no_micro_step_of_the_breakdown():
    """Delayed scales begin with one, in the first step."""
    fp8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "fp8_recipe": "delayed"}
    assert train(steps=2, **fp8, debug_time_breakdown=True) == 0
    found = [r["breakdown"] for r in records("info") if r["type"] == "time-breakdown"]
    assert [[part.get("step", "opt") for part in parts] for parts in found] == [[0, 1, "opt"]] * 2


def test_cpu_path_loads_no_cuda_library():
    """On --device cpu nobody even tries; auto says in one line why there is no GPU."""
    command = [sys.executable, "-c", WITHOUT_CUDA, "train", *flags(steps=1, device="auto")]
    env = os.environ | {"PYTHONPATH": str(Path(training.__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stderr == ""
    note = r"^Running on the CPU, meant for small models \(CuPy cannot be loaded .* is blocked"
    assert re.search(note, done.stdout, re.MULTILINE)


def test_only_one_epoch_by_default():
    assert train() == 0
    assert len(records("step")) == 5
    assert train(epochs=2) == 0
    assert len(records("step")) == 10


def test_epochs_end_with_the_data_whatever_a_step_took_before(capsys):
    """An epoch has 20 sequences: steps of 4, then after the second one steps of 2 or of 6."""
    assert train(epochs=2, ckpt_interval=2, ckpt_keep_n=0) == 0
    for accumulation, more in ((1, 6 + 10), (3, 2 + 4)):
        again = {"grad_accumulation": accumulation, "log_file": f"{accumulation}.json"}
        assert train(epochs=2, **again, **{"continue": "2"}) == 0
        assert sorted(measured(f"{accumulation}.json")) == list(range(2, 2 + more))
        out = capsys.readouterr().out
        assert f"Starting training for {2 + more} steps (2.00 epochs in total)\n" in out
        assert f"[T] step {1 + more:5} [100.0%]" in out


def test_an_epoch_ends_with_a_step_that_is_not_full(capsys):
    """Its loss is the mean of what is left, on any number of ranks; without a learning rate each
    sequence has the same loss in every run. It is made again bit for bit."""
    one = {"train_file": "data/train-0.bin", "learning_rate": 0, "epochs": 2}
    assert train(**one, batch_size=1, grad_accumulation=1) == 0
    single = [r["loss"] for r in records("step")]
    expected = [np.mean(single[:8]), single[8], np.mean(single[9:17]), single[17]]
    for gpus, accumulation in ((1, 4), (2, 2)):
        made = {"gpus": gpus, "grad_accumulation": accumulation, "batch_size": 2}
        assert train(**one, **made, ckpt_interval=1, ckpt_keep_n=0) == 0
        found = records("step")
        assert [r["step_tokens"] for r in found] == [8 * T, T, 8 * T, T]
        np.testing.assert_allclose([r["loss"] for r in found], expected, rtol=1e-6)
        assert [r["epoch"] for r in found] == [0.888889, 1.0, 1.888889, 2.0]
        assert "Starting training for 4 steps (2.00 epochs" in capsys.readouterr().out
        whole = measured()
        assert train(**one, **made, log_file="again.json", **{"continue": "1"}) == 0
        assert measured("again.json") == {step: whole[step] for step in (1, 2, 3)}
    assert train(**one, batch_size=16, grad_accumulation=4) == 0
    assert [r["step_tokens"] for r in records("step")] == [9 * T] * 2


def test_what_fills_no_step_is_left_out_where_that_is_asked_for(capsys):
    one = {"train_file": "data/train-0.bin", "drop_last": True, "epochs": 2}
    assert train(**one, grad_accumulation=4) == 0
    assert [r["step_tokens"] for r in records("step")] == [8 * T] * 2
    assert train(**one, grad_accumulation=5) == 2
    assert "--drop-last: the 4 batches of an epoch are less than a step" in capsys.readouterr().err


def test_lines_show_the_part_of_the_epoch_and_of_the_run(capsys):
    assert train(epochs=2, eval_every_n_steps=3) == 0
    out = capsys.readouterr().out
    brackets = re.findall(r"^\[T\] step +\d+ \[ *([\d.]+)%\] .* \| run ([\d.]+)%$", out, re.M)
    assert [part for part, _ in brackets] == ["20.0", "40.0", "60.0", "80.0", "100.0"] * 2
    assert [float(run) for _, run in brackets] == [10.0 * step for step in range(1, 11)]
    assert "[V] step     3 [60.0%] |" in out and "[V] step     6 [20.0%] |" in out
    assert [r["epoch"] for r in records("step")][3:6] == [0.8, 1.0, 1.2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warmup": 5}, "--warmup 5 is not shorter than the run, which has 5 steps"),
        ({}, "WARNING: 5 steps teach little: give more --epochs or data"),
        ({"eval_file": "data/train-1.bin"}, "/data/train-1.bin' is trained on, too"),
        ({"eval_file": "short.bin", "steps": 1}, "no file of eval fills a sequence of 16 tokens"),
    ],
)
def test_what_will_hardly_be_meant_is_said_before_the_first_step(changes, said, capsys):
    with TokenWriter("short.bin", VOCAB) as writer:
        writer.write(np.arange(9))
    assert train(**changes) == 0
    out, err = capsys.readouterr()
    assert said in err or said in out[: out.index("[T]")]


def test_files_that_are_too_short_for_all_ranks_are_said(capsys):
    write_tokens(Path("data/train-9.bin"), 3)
    assert train(gpus=3) == 0
    assert capsys.readouterr().err == ""
    assert train(gpus=4, drop_last=True) == 0
    assert capsys.readouterr().err == "", "no file has a group of its own"
    assert train(gpus=4, drop_last=True, data_order="llmq") == 0
    assert capsys.readouterr().err == (
        "warning: --train-file: 1 of 4 files are never used: they have less than 4 sequences, one "
        "for each GPU\n"
    )


def test_fine_tuning_a_model_directory(capsys):
    """A model of transformers, trained a little, is still one, and better on its data."""
    config = transformers.Qwen2Config(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("pretrained")
    fine_tune = {"model": "pretrained", "from_scratch": False, "eval_file": "data/train-0.bin"}
    assert train(**fine_tune, steps=10, eval_every_n_steps=1) == 0
    assert "Loading model from `pretrained` ...\n" in capsys.readouterr().out
    first, last = records("eval")[0], records("eval")[-1]
    assert last["loss"] < first["loss"]
    again = {"model": "out", "log_file": "again.json", "out_dir": "again"}
    assert train(**fine_tune | again, steps=0) == 0
    assert records("eval", "again.json")[0]["loss"] == last["loss"]
    transformers.AutoModelForCausalLM.from_pretrained("again")
    tokenizer = transformers.AutoTokenizer.from_pretrained("again")
    assert tokenizer.decode(tokenizer("Hé\n").input_ids) == "Hé\n"


# ------------------------------------------------------------------------------------------------
# Runs that cannot go on


def test_numbers_that_explode(capsys):
    """No update is made without a finite norm; after ten of them in a row the run ends."""
    assert train(steps=20, learning_rate=1e30, grad_clip=0) == 2
    out, err = capsys.readouterr()
    assert out.count("changed no weights: the gradient norm is ") == MAX_SKIPPED
    assert out.count("; first seen in ") == 1
    assert err.startswith("error: 10 steps in a row changed no weights, the last one is ")
    assert "lower --learning-rate" in err
    assert err.count("\n") == 1
    assert records("step")[-1]["norm"] is None
    assert records("info")[-1]["message"].startswith("WARNING: step ")
    assert not Path("out").exists()


def test_data_without_targets(capsys):
    for path in Path("data").glob("train-*.bin"):
        path.unlink()
    write_tokens(Path("data/train-0.bin"), 9, mask=np.zeros(9 * T + 1, bool))
    assert train(steps=20) == 2
    assert "'data/train-0.bin' has nothing to train on: all tokens are masked" in (
        capsys.readouterr().err
    )
    mask = np.zeros(100 * T + 1, bool)
    mask[1] = True  # of one step among 25, so that ten in a row have no target
    write_tokens(Path("data/train-0.bin"), 100, mask=mask)
    assert train(steps=25) == 2
    assert "all targets are masked; look at the loss masks" in capsys.readouterr().err


def test_a_step_without_targets_has_no_loss_and_is_counted(capsys):
    for path in Path("data").glob("train-*.bin"):
        path.unlink()
    mask = np.ones(9 * T + 1, bool)
    mask[1 : 4 * T + 1] = False
    write_tokens(Path("data/train-0.bin"), 9, mask=mask)
    how = {"batch_size": 1, "grad_accumulation": 1, "gpus": 1, "steps": 9, "eval_file": "none"}
    assert train(**how, packing="concat") == 0
    losses = [r["loss"] for r in records("step")]
    assert losses.count(None) == 4 and all(r["norm"] == 0 for r in records("step") if not r["loss"])
    out = capsys.readouterr().out
    assert out.count("| norm   0.000000 | loss       none | tps ") == 4 and "nan" not in out
    assert "WARNING: 4 of 9 steps had no target to train on, and changed nothing: look at" in out


def test_validation_data_without_targets(capsys):
    """The mean over nothing is nan, as in torch; the run goes on, and says why."""
    write_tokens(Path("data/eval.bin"), 7, mask=np.zeros(7 * T + 1, bool))
    assert train(steps=2, eval_every_n_steps=1) == 0
    warning = "WARNING: the validation loss is nan: all targets that were read of 'data/eval.bin' "
    assert [r["step"] for r in records("info") if r["message"].startswith(warning)] == [1, 2]
    assert capsys.readouterr().out.count(warning) == 2
    assert [r["loss"] for r in records("eval")] == [None, None]
    assert Path("out/model.safetensors").is_file()


@pytest.mark.parametrize("flag", ["--out-dir", "--checkpoint-dir"])
def test_folders_that_cannot_be_made_are_found_at_the_start(flag, capsys):
    os.symlink("nowhere/scratch", "link")
    for folder, problem in {
        "link/x": "'link' is a link to what does not exist",
        "link": "'link' is a link to what does not exist",
        f"new/{'x' * 300}/y": "the name is too long",
    }.items():
        assert train(steps=1, **{flag[2:]: folder}) == 2
        message = f"error: {flag}: cannot write into '{folder}': {problem}, choose another one\n"
        assert capsys.readouterr().err == message
    assert sorted(os.listdir()) == ["data", "link", "model"]


def test_damage_in_the_middle_of_the_data_costs_no_steps(capsys):
    """The run saves what was learned, and goes on with repaired data as if nothing had been."""
    options = {"train_file": "data/train-0.bin", "steps": 6}
    assert train(**options, out_dir="whole", log_file="whole.json") == 0
    path = Path("data/train-0.bin")
    content = path.read_bytes()
    tokens = np.frombuffer(content[1024:], np.int32).copy()
    sequence = Permutation(9, TrainConfig().train_seed, 0, 0)[5]
    tokens[sequence * T + 3] = 300
    path.write_bytes(content[:1024] + tokens.tobytes())
    assert train(**options) == 2
    err = capsys.readouterr().err
    position = sequence * T + 3
    assert f"has token id 300 at position {position}" in err and err.count("\n") == 1
    saved = len(records("step"))
    assert os.listdir("ckpt") == [f"step_{saved:08d}"]
    path.write_bytes(content)
    assert train(**options, **{"continue": ""}) == 0
    assert measured() == measured("whole.json")


def full_disk(patch, room):
    """Checkpoints of these steps find no room when their files are forced to the disk."""
    real = os.fsync

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if any(f"ckpt/step_{step:08d}" in path for step in room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    patch.setattr("llmq.base.files.os.fsync", fsync)


def test_full_disk_while_saving(monkeypatch, capsys):
    """The run goes on and says so each time, the last checkpoint stays, and there is a next one."""
    options = {"grad_accumulation": 1, "ckpt_interval": 1, "ckpt_keep_n": 1}
    full_disk(monkeypatch, room=(2, 3))
    assert train(steps=3, **options) == 0
    out, err = capsys.readouterr()
    assert err == ""
    problem = "the disk is full, writing 'ckpt/step_00000002.tmp/"
    assert out.count(f"WARNING: no checkpoint of step 2: {problem}") == 1
    assert os.listdir("ckpt") == ["step_00000001"]
    messages = [r["message"] for r in records("info") if r["step"] == 2]
    assert any(message.startswith("WARNING: no checkpoint of step 2: ") for message in messages)
    assert train(steps=5, **options, **{"continue": ""}) == 0
    out = capsys.readouterr().out
    assert out.count("WARNING: no checkpoint of step") == 2
    assert sorted(os.listdir("ckpt")) == ["step_00000001", "step_00000004"], "there was room again"
    assert Path("out/model.safetensors").is_file()


@pytest.mark.parametrize("background", [None, ""])
def test_a_disk_that_stays_full_cannot_be_overlooked(background, monkeypatch, capsys):
    options = {"grad_accumulation": 1, "ckpt_interval": 1, "ckpt_background": background}
    options |= {"steps": 8, "eval_file": "none"}
    with monkeypatch.context() as patch:
        full_disk(patch, room=(2, 3, 4, 5, 7))  # there is room for step 6
        assert train(**options) == 0
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if line.startswith("ALARM: ")]
    counts = [int(line.split()[1]) for line in said]
    assert counts == [3, 4] and "the newest is that of step 1: the disk is full" in said[-1]
    assert out.count("!" * 80) == 4
    alarms = [r["message"] for r in records("info") if r["type"] == "alarm"]
    assert [f"ALARM: {text}" for text in alarms] == said
    full_disk(monkeypatch, room=range(9))
    assert train(**options | {"ckpt_required": 2, "overwrite": ""}) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert line.startswith("error: --ckpt-required: 2 checkpoints in a row could not be written")
    assert "the newest is none: the disk is full" in line and "Saving model" not in out


def test_full_disk_at_the_end(monkeypatch, capsys):
    """The model is exported all the same; then there is one more chance, and an error after it."""
    full_disk(monkeypatch, room=(2,))
    assert train(steps=2, ckpt_interval=1, save_training_state=True) == 2
    out, err = capsys.readouterr()
    assert "WARNING: no checkpoint of step 2: the disk is full" in out and "Done." in out
    assert err.startswith("error: the disk is full, writing 'ckpt/step_00000002.tmp/")
    assert err.count("\n") == 1
    assert os.listdir("ckpt") == ["step_00000001"]
    assert Path("out/model.safetensors").is_file()


def test_full_disk_when_a_signal_comes(monkeypatch, capsys):
    full_disk(monkeypatch, room=(2,))
    signal_after(monkeypatch, 1)
    assert train(steps=4) == 2
    assert capsys.readouterr().err.startswith("error: the disk is full, writing 'ckpt/step_")


def test_full_disk_under_the_log(monkeypatch, capsys):
    """One warning, and the run goes on; what was to be logged meanwhile is logged afterwards."""
    write = JsonLog._replace_end

    def full(log, data):
        if b'"step": 2, "step_tokens"' in data and b'"step": 4, "step_tokens"' not in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(log, data)

    monkeypatch.setattr(JsonLog, "_replace_end", full)
    assert train(steps=6, save_training_state=True) == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: cannot write the log 'log.json' (No space left on device): ")
    assert err.count("\n") == 1
    assert os.listdir("ckpt") == ["step_00000006"]
    assert [r["step"] for r in records("step")] == list(range(6))
