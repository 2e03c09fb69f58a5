"""`llmq train` on several ranks from its command line: resuming, signals, reports, failures."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import transformers

from llmq.base.errors import LlmqError
from llmq.comm.host import connect_host
from llmq.comm.links import Link, LinkTable
from llmq.model.step import Step
from llmq.options.options_io import make_config
from llmq.plan.sol import peaks
from llmq.run import training
from tests.fake_nvml import FakeGpu, fake_sensors
from tests.run.test_training import GPU, GpuLike, digests, measured
from tests.runs import B, T, make_workplace, records, signal_after, train, write_tokens

STEPS = 7
WORLD = 3


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    write_tokens(Path("data/train-3.bin"), 20, seed=5)


@pytest.mark.parametrize("level", [1, 3])
def test_a_run_that_is_interrupted_and_continued(level, monkeypatch, capsys):
    """The same bits as of a run that is not, evaluations and export included."""
    options = {"steps": STEPS, "save_training_state": True, "eval_every_n_steps": 3}
    options |= {"gpus": WORLD, "zero_level": level, "model_dtype": "bf16"}
    whole = {"log_file": "whole.json", "out_dir": "whole", "checkpoint_dir": "whole-ckpt"}
    assert train(**options, **whole, ckpt_interval=5) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "[System 0]\n  Device 0: CPU\n  Ranks: 3 threads\n  Memory: " in out
    assert len(re.findall(r"^\[T\] step", out, re.MULTILINE)) == STEPS

    with monkeypatch.context() as patch:
        signal_after(patch, 3, signal.SIGTERM)
        assert train(**options) == 128 + signal.SIGTERM
    assert os.listdir("ckpt") == ["step_00000004"]
    out, err = capsys.readouterr()
    assert out.endswith("Stopped by SIGTERM after 4 steps; go on with --continue\n")
    assert err == ""
    assert train(**options, **{"continue": ""}) == 0
    assert measured() == measured("whole.json")
    assert len(measured()) == STEPS
    files = ["model.safetensors", "config.json"]
    assert digests("out", files) == digests("whole", files)
    last = f"step_{STEPS:08d}"
    shards = [p.name for p in Path("ckpt", last).glob("*.safetensors")]
    assert len(shards) == 3 * WORLD
    assert digests(f"ckpt/{last}", shards) == digests(f"whole-ckpt/{last}", shards)
    ends = [records("eval", log)[-1] for log in ("log.json", "whole.json")]
    assert ends[0]["loss"] == ends[1]["loss"]
    transformers.AutoModelForCausalLM.from_pretrained("out")

    # Another number of ranks goes on where this one was.
    assert train(**options | {"gpus": 2, "steps": STEPS + 1}, **{"continue": ""}) == 0
    assert "warning: a step has 128 tokens, in the checkpoint's run it had 192" in (
        capsys.readouterr().err
    )
    assert records("step")[-1]["step"] == STEPS


def test_counts_are_of_all_ranks():
    assert train(steps=2, gpus=WORLD, eval_every_n_steps=1, eval_num_steps=1) == 0
    options = {r["name"]: r["value"] for r in records("option")}
    assert options["total-batch"] == WORLD * 2 * B * T
    # Chunks: 9, 6, 5 and 20, in groups of 3: 14 groups, 7 batches, 4 steps of 2 micro-steps.
    assert options["steps-per-epoch"] == 4
    assert {r["step_tokens"] for r in records("step")} == {WORLD * 2 * B * T}
    assert [r["eval_tokens"] for r in records("eval")] == [WORLD * B * T, 7 * T]  # 7 in all


def test_an_option_for_several_gpus_on_one(capsys):
    assert train(steps=1, gpus=1, all_to_all_reduce=True) == 0
    assert capsys.readouterr().err == "warning: --all-to-all-reduce has no effect with one GPU\n"


def test_time_breakdown_of_ranks(capsys):
    assert train(steps=1, gpus=2, zero_level=2, debug_time_breakdown=True) == 0
    shape = r"Timing breakdown:\n(?:  fwd.*\n){2}  opt.*\n  waits for other ranks +([\d.]+)ms\n"
    (shown,) = re.search(shape, capsys.readouterr().out).groups()
    (step,) = records("step")
    assert shown == f"{step['communication']:.2f}"
    first, second = (r for r in records("info") if r["type"] == "time-breakdown")
    assert (first["gpu"], second["gpu"]) == (0, 1)
    for record in (first, second):
        assert [sorted(part) for part in record["breakdown"]] == (
            [["bwd", "fwd", "head", "step"]] * 2 + [["opt"]]
        )


def test_reports_of_two_gpus(monkeypatch, capsys):
    """Each GPU is asked in its own thread, and has records of its own."""
    table = LinkTable(
        gpus=[0, 1],
        links=[
            [None, Link(kind="peer", speed=390.0, reason=None)],
            [Link(kind="staged", speed=25.0, reason="no access"), None],
        ],
    )
    asked = []
    fake_sensors(monkeypatch, FakeGpu(0, power=7000), FakeGpu(1, power=8000))

    def connect(devices, options, workers, world):
        connect_host(devices, workers, world)
        return table

    def gpu_info(index):
        asked.append((index, threading.current_thread().name))
        return GPU

    class Gpu(GpuLike):
        index = property(lambda self: self.mesh.rank)

    monkeypatch.setattr("llmq.runtime.machine.HostDevice", Gpu)
    monkeypatch.setattr("llmq.run.ranks.connect", connect)
    monkeypatch.setattr(training, "measured_peak", lambda dev: 0.8 * peaks(GPU.name)[1])
    monkeypatch.setattr(training, "gpu_info", gpu_info)
    assert train(steps=5, gpus=2, log_gpu_util=4) == 0
    out = capsys.readouterr().out
    assert set(asked) == {(0, "rank 0"), (1, "rank 1")}
    assert "\n[System 0]\n  Device 0: NVIDIA" in out
    assert "\n[System 1]\n  Device 1: NVIDIA" in out
    assert "[Links] GB/s" in out and "no access" in out
    assert [(r["rank"], r["id"]) for r in records("gpu-model")] == [(0, 0), (1, 1)]
    found = [(r["step"], r["rank"], r["power"]) for r in records("gpu")]
    assert found == [(0, 0, 7000), (0, 1, 8000), (4, 0, 7000), (4, 1, 8000)]
    assert all(r["communication"] >= 0 for r in records("gpu"))
    assert re.search(r"\[G\] step     4 \[gpu  1\] .* \| waits \d+\.\d ms\n", out)
    assert records("links")[0]["links"] == table.records()
    (sol,) = records("sol")
    assert re.search(rf"SOL: +{sol['tps']} tok/s", out)


@pytest.mark.parametrize("kind", ["peer", "staged"])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_advice_about_mirrors(kind, mirrored, streamed):
    link = Link(kind=kind, speed=25.0, reason=None)
    table = LinkTable(gpus=[0, 1], links=[[None, link], [link, None]])
    options = {"mirror-weights": mirrored, "shard-weights": streamed, "memcpy-all-gather": True}
    advice = training.about_mirrors(make_config(options), table)
    expected = None
    if streamed and kind == "peer" and mirrored:
        expected = "for nothing"
    if streamed and kind == "staged" and not mirrored:
        expected = "faster with"
    assert advice is expected or expected in advice


def test_a_failing_rank_is_one_line(monkeypatch, capsys):
    real = Step.train

    def train_step(self, step, *args):
        if self.dev.mesh.rank == 2 and step == 3:
            raise LlmqError("the GPU has gone")
        return real(self, step, *args)

    monkeypatch.setattr(Step, "train", train_step)
    assert train(steps=6, gpus=WORLD) == 2
    err = capsys.readouterr().err
    assert err == "error: rank 2: the GPU has gone\n"
    assert [r["step"] for r in records("step")] == [0, 1, 2]


def test_second_signal_ends_the_ranks_at_once(monkeypatch):
    real = Step.micro_step

    def impatient(self, micro_step, *args, **last):
        if self.dev.mesh.rank == 1 and self.dev.last_operation != "none":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)
        return real(self, micro_step, *args, **last)

    monkeypatch.setattr(Step, "micro_step", impatient)
    assert train(steps=5, gpus=2) == 130
    assert not Path("ckpt").exists()
