"""A plan says of the disk what a run writes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from llmq.base.dtypes import MIB, NO_LIMITS
from llmq.checkpoint.best import Best
from llmq.commands.cli import _run
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.memory import DiskUse, disk_use
from llmq.run.guard import Guard
from llmq.state.params import weight_table
from llmq.state.placement import place
from tests.models import hf_model, trainer_for
from tests.runs import make_workplace, train


def tensor_bytes(path: Path) -> int:
    """Bytes of the tensors of a safetensors file, whose header begins with its own size."""
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    return path.stat().st_size - 8 - header


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen2", {}),
        ("qwen2_untied", {"model_dtype": "bf16", "master_dtype": "fp32", "opt_v_dtype": "bf16"}),
        ("gpt2", {"model_dtype": "bf16", "opt_m_dtype": "e4m3", "opt_v_dtype": "e4m3"}),
        ("qwen2", {"model_dtype": "bf16", "zero_level": 3, "gpus": 2}),
        ("qwen2", {"model_dtype": "bf16", "matmul_dtype": "e4m3", "master_dtype": "fp32"}),
    ],
)
def test_a_checkpoint_is_as_large_as_planned(tmp_path, model, options):
    hf_model(model).save_pretrained(tmp_path / "model")
    with trainer_for(tmp_path / "model", **options) as trainer:
        saved = trainer.save(tmp_path / "ckpt")
        disk = disk_use(trainer.config, trainer.model, trainer.plan.placement)
        trainer.export(tmp_path / "out")
    assert sum(map(tensor_bytes, saved.glob("*.safetensors"))) == disk.checkpoint
    assert sum(map(tensor_bytes, (tmp_path / "out").glob("*.safetensors"))) == disk.model


def use(**options: object) -> DiskUse:
    config: TrainConfig = make_config({n.replace("_", "-"): v for n, v in options.items()})
    model = preset("tiny")
    return disk_use(config, model, place(config.for_step, weight_table(model)))


@pytest.mark.parametrize(
    ("options", "kept", "deletes"),
    [
        ({"steps": 7, "ckpt_interval": 2}, [2, 4, 6, 7], False),
        ({"steps": 7, "ckpt_interval": 2, "ckpt_keep_n": -1}, [2, 4, 6, 7], False),
        ({"steps": 7, "ckpt_interval": 1, "ckpt_major": 2}, [1, 2, 3, 4, 5, 6, 7], False),
        ({"steps": 6, "ckpt_interval": 2, "ckpt_major": 3}, [2, 4, 6], False),
        ({"steps": 4, "ckpt_interval": 2, "save_training_state": False}, [2], False),
        ({"steps": 45, "ckpt_interval": 5, "ckpt_keep_n": 1}, [25, 35, 40, 45], True),
        ({"steps": 4, "ckpt_interval": 0}, [], False),
        ({"steps": 4, "ckpt_interval": 4}, [], False),
        ({"steps": 4, "ckpt_interval": 4, "save_training_state": True}, [4], False),
    ],
)
def test_as_many_checkpoints_are_kept_as_planned(tmp_path, monkeypatch, options, kept, deletes):
    """The default keeps the three newest, and the good one: no step is bad here, though a norm of
    so small a model may be far above the others, depending on how the processor sums."""
    monkeypatch.setattr(Guard, "limits", lambda self, step: NO_LIMITS)
    disk = use(**options)
    assert (disk.kept, disk.every, disk.deletes) == (len(kept), None, deletes)
    monkeypatch.chdir(make_workplace(tmp_path))
    options.setdefault("save_training_state", None)
    assert train(eval_file="none", batch_size=1, grad_accumulation=1, **options) == 0
    assert sorted(int(path.name[5:]) for path in Path("ckpt").glob("step_*")) == kept


def test_where_the_data_decides_about_the_steps():
    steps = {"steps": 1_000_000_000, "ckpt_interval": 3, "ckpt_major": 2, "ckpt_keep_n": 5}
    assert use(**steps).kept == 166_666_666 + 1 + 5
    unknown = use(ckpt_interval=100)
    assert (unknown.kept, unknown.every, unknown.deletes) == (3, None, True)
    assert unknown.total == 3 * unknown.checkpoint + unknown.model
    major = use(ckpt_interval=100, ckpt_major=250)
    assert (major.kept, major.every, major.total) == (3, 500, None)
    every = use(ckpt_keep_n=0, ckpt_interval=100)
    assert (every.kept, every.every, every.deletes) == (0, 100, False)
    assert "one checkpoint every 100 steps, the model (" in every.facts()["On disk"]
    assert every.record()["checkpoints_kept"] is every.record()["disk_bytes"] is None


@pytest.mark.parametrize(
    ("options", "kept", "deletes"),
    [
        # Validations are after steps 3, 6 and 7.
        ({"steps": 7, "ckpt_interval": 2, "ckpt_keep_n": -1}, [2, 3, 4, 6, 7], False),
        ({"steps": 7, "ckpt_interval": 0, "ckpt_keep_n": 4}, [3, 6, 7], False),
        ({"steps": 7, "ckpt_keep_n": 0, "eval_at_start": True}, [0, 3, 6, 7], False),
    ],
)
def test_as_many_as_if_each_were_the_best(tmp_path, monkeypatch, options, kept, deletes):
    monkeypatch.setattr(Best, "_is_better", lambda self, value: True)
    options |= {"keep_best": "loss", "eval_every_n_steps": 3}
    disk = use(**options)
    assert (disk.kept, disk.every, disk.deletes) == (len(kept), None, deletes)
    assert f": at most {len(kept)} checkpoints, the model" in disk.facts()["On disk"]
    monkeypatch.chdir(make_workplace(tmp_path))
    assert train(batch_size=1, grad_accumulation=1, save_training_state=True, **options) == 0
    assert sorted(int(path.name[5:]) for path in Path("ckpt").glob("step_*")) == kept


def test_the_best_of_many():
    tasks = {"keep_best": "arc/acc", "task_every": 150, "ckpt_interval": 100}
    assert use(steps=1000, **tasks).kept == 3 + 1
    # 3 newest, the best, and the multiples of 300: of the interval, and of the evaluations.
    major = {"ckpt_major": 300} | tasks
    assert use(steps=1000, **major).kept == 3 + 1 + 3
    assert use(steps=1000, ckpt_keep_n=0, **tasks).kept == 10 + 6 - 3
    assert (use(**tasks).kept, use(**tasks).every) == (4, None)
    assert (use(**major).every, use(ckpt_keep_n=0, **tasks).every) == (300, 50)
    assert "at most one checkpoint every 50 steps" in use(ckpt_keep_n=0, **tasks).facts()["On disk"]


@pytest.mark.parametrize("fit", [[], ["--fit", "--memory-limit=400MiB"]])
def test_plan_says_it(capsys, fit):
    args = ["plan", "--model=tiny", "--from-scratch", "--device=cpu", "--seq-len=64", *fit]
    assert _run(args) == 0
    out = capsys.readouterr().out
    assert _run([*args, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    checkpoint, model = (-(-record[f"{name}_bytes"] // MIB) for name in ("checkpoint", "model"))
    total = -(-record["disk_bytes"] // MIB)
    assert f"  Checkpoint:      {checkpoint} MiB\n" in out
    assert (
        f"  On disk:         {total} MiB: 3 checkpoints, the model ({model} MiB); one more "
        "checkpoint while it is written\n"
    ) in out
    assert record["disk_bytes"] == 3 * record["checkpoint_bytes"] + record["model_bytes"]
