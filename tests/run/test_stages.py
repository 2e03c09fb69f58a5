"""Runs whose sequences become longer: --seq-len with several lengths."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmq.base.errors import ConfigError
from llmq.options.options_io import make_config
from llmq.run.resume import of_longest, stages_of
from tests.run.test_places import run_of_checkpoint
from tests.runs import before_step, make_workplace, records, signal_after, train

LENGTHS = "8:0.5,16:0.25,32:0.25"
RUN = {"seq_len": LENGTHS, "batch_size": 1, "grad_accumulation": 1, "steps": 8}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    return tmp_path


def weights() -> dict[str, np.ndarray]:
    return load_file("out/model.safetensors")


def losses() -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records("step")}


def test_stages_have_the_tokens_of_the_longest():
    config = make_config({"seq-len": LENGTHS, "batch-size": 3, "steps": 10})
    assert (config.seq_len, config.batch_size, config.seq_stages) == (32, 3, LENGTHS)
    stages = stages_of(config)
    found = [(s.config.seq_len, s.config.batch_size, s.first, s.stop) for s in stages]
    assert found == [(8, 12, 0, 5), (16, 6, 5, 8), (32, 3, 8, None)]
    for stage in stages:
        assert stages_of(stage.config) == stages and of_longest(stage.config) == config


def test_a_run_goes_on_exactly_from_anywhere(place, monkeypatch, capsys):
    """Also from where a stage ends; each stage is a run with its length, and data of its own."""
    assert train(**RUN) == 0
    want, of_steps = weights(), losses()
    assert sorted(of_steps) == [*range(8)]
    out = capsys.readouterr().out
    assert out.count("Setup took") == 3 and out.count("Saving model") == 1
    for step in (2, 4, 6):
        with monkeypatch.context() as patch:
            signal_after(patch, step - 1, signal.SIGTERM)
            assert train(**RUN) == 128 + signal.SIGTERM
        assert train(**dict.fromkeys(RUN), **{"continue": ""}) == 0
        assert losses() == of_steps, step
        for name, value in weights().items():
            np.testing.assert_array_equal(value, want[name], err_msg=name)
    # The first stage alone, by its own options.
    assert train(**RUN | {"seq_len": 8, "batch_size": 4, "steps": 4}) == 0
    assert losses() == {step: loss for step, loss in of_steps.items() if step < 4}


HALVES = {"seq_len": "8:0.5,16:0.5", "batch_size": 2, "grad_accumulation": 1, "steps": 8}
ALWAYS = {"ckpt_interval": 2, "ckpt_keep_n": 0, "save_training_state": True}
ALL = [f"step_{step:08d}" for step in (2, 4, 6, 8)]


@pytest.fixture
def halves(place):
    """A run of two stages with all its checkpoints: ckpt, kept in `kept`, and its losses."""
    assert train(**HALVES, **ALWAYS) == 0
    shutil.copytree("ckpt", "kept")
    return losses()


def lengths_read(monkeypatch) -> list[tuple[int, int]]:
    """Step and length of each sequence that is trained from now on; grows while a run goes on."""
    found = []
    before_step(
        monkeypatch,
        lambda loop: found.append((loop.trainer.steps_done, loop.trainer.config.seq_len)),
    )
    return found


@pytest.mark.parametrize(
    "by, step, left",
    [
        *[("newest", step, (step,)) for step in (2, 4, 6)],
        ("newest", 8, (2, 4, 6, 8)),
        *[("number", step, (2, 4, 6, 8)) for step in (2, 4, 6)],
        ("number", 2, (2,)),
        ("number", 2, (2, 4)),
        *[("path", step, (2, 4, 6, 8)) for step in (2, 4)],
        ("path", 6, ()),
    ],
)
def test_any_name_of_a_checkpoint_goes_on_from_it(halves, monkeypatch, by, step, left):
    """The second stage goes on from the checkpoint that the first one of this run has written, not
    from the checkpoint that --continue names. left: the checkpoints that are there."""
    for path in Path("ckpt").glob("step_*"):
        if int(path.name[5:]) not in left:
            shutil.rmtree(path)
    spec = {"newest": "", "number": str(step), "path": f"kept/step_{step:08d}"}[by]
    with monkeypatch.context() as patch:
        read = lengths_read(patch)
        places = {"log_file": "log.json", "checkpoint_dir": "ckpt", "out_dir": "out"}
        more = ALWAYS | {"continue": spec, "overwrite": None}
        assert train(**dict.fromkeys(HALVES), **places | more) == 0
    assert read == [(at, 8 if at < 4 else 16) for at in range(step, 8)]
    assert losses() == halves
    now = sorted(path.name for path in Path("ckpt").glob("step_*"))
    assert now == [name for name in ALL if int(name[5:]) in left or int(name[5:]) > step]
    moved = sorted(path.name for path in Path().glob("ckpt.old-*/step_*"))
    assert moved == [f"step_{at:08d}" for at in left if at > step and step < 8]


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_fork_goes_through_its_own_stages(halves, step):
    own = {"name": "fork", "checkpoint_dir": "c2", "out_dir": "o2", "log_file": "l2.json"}
    more = own | {"continue": f"ckpt/step_{step:08d}"}
    assert train(**dict.fromkeys(HALVES), **more, **ALWAYS) == 0
    found = {record["step"]: record["loss"] for record in records("step", "l2.json")}
    assert found == {at: loss for at, loss in halves.items() if at >= step}
    assert sorted(path.name for path in Path("ckpt").glob("step_*")) == ALL
    assert not list(Path().glob("*.old-*"))
    ids = {run_of_checkpoint(path) for path in Path("c2").glob("step_*")}
    assert len(ids) == 1 and ids != {run_of_checkpoint("ckpt/step_00000008")}


def test_a_stage_does_not_count_as_a_change_of_sizes(halves, capsys):
    capsys.readouterr()
    assert train(**HALVES, **ALWAYS, **{"continue": "2"}) == 0
    out, err = capsys.readouterr()
    assert "in the checkpoint's run it was" not in out + err


def test_one_length_takes_the_place_of_several(halves, capsys):
    capsys.readouterr()
    only = dict.fromkeys(HALVES) | {"seq_len": 16, "continue": "2"}
    assert train(**only) == 2, "the stage of the checkpoint has another length"
    assert "the sequence length changed since the checkpoint" in capsys.readouterr().err
    assert train(**only | {"seq_len": 8, "steps": 5}) == 0
    out, err = capsys.readouterr()
    assert "--seq-len is 8, in the checkpoint's run it was 16" in out + err


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seq-len": "8:0.5,16:0.4"}, "--seq-len: expected LENGTH:PART,.* with parts that are 1"),
        ({"seq-len": "8:0.5,x:0.5"}, "--seq-len: expected LENGTH:PART"),
        ({"seq-len": LENGTHS}, "--seq-len: lengths have parts of the steps: give --steps"),
        ({"seq-len": "24:0.5,32:0.5", "steps": 4}, "24 is no multiple of 4 that divides the 128"),
        ({"seq-len": 64, "seq-stages": LENGTHS, "steps": 4}, "64 is none of 8:0.5,16:0.25,32"),
    ],
)
def test_lengths_that_make_no_run(options, message):
    with pytest.raises(ConfigError, match=message):
        make_config(options).validate()


def test_a_later_stage_that_cannot_be_run_is_told_before_the_first(place, capsys):
    assert train(**RUN | {"seq_len": "16:0.5,128:0.5"}) == 2
    assert "--seq-len: 128 exceeds the model's 64 positions" in capsys.readouterr().err
    assert not Path("ckpt").exists() and not Path("log.json").exists()
