"""Runs whose sequences become longer: --seq-len with several lengths."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmq.base.errors import ConfigError
from llmq.options.options_io import make_config
from llmq.run.resume import of_longest, stages_of
from tests.runs import make_workplace, records, signal_after, train

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
