"""A configuration as a command line, and back."""

from __future__ import annotations

import shlex

import pytest

from llmq.commands.cli import _run
from llmq.options.option_file import command_line, flag
from llmq.options.options import OPTIONS
from llmq.options.options_io import make_config

TINY = {"model": "tiny", "from-scratch": True}
CONFIGS = {
    "defaults": {},
    "implied": {"recompute-block": True, "zero-level": 3, "matmul-dtype": "e4m3"},
    "explicit": {"master-dtype": "fp32", "opt-m-dtype": "bf16", "recompute-layers": "0-3,5"},
    "names": {"name": "my run", "out-dir": "a b/%n", "train-file": "data/*.bin"},
    "off": {"save-training-state": False, "tune": False, "use-cuda-graphs": False},
    "values": {"memory-limit": "5GiB", "learning-rate": 6e-4, "steps": 7, "continue": "latest"},
    "epochs": {"epochs": 2, "seed": 0, "debug-log-abs-max": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_back_through_the_command_line(name, monkeypatch):
    config = make_config(TINY | CONFIGS[name])
    line = command_line(config)
    assert line[:2] == ["llmq", "train"]
    started = []
    monkeypatch.setattr("llmq.run.training.run_training", lambda config, *_: started.append(config))
    assert _run(shlex.split(shlex.join(line))[1:]) == 0
    (again,) = started
    different = {n for n in OPTIONS if getattr(again, n) != getattr(config, n)}
    assert different <= {"log_file"}  # by the time of the start
    # None of the flags could be left out.
    assert len(line) - 2 <= len(TINY | CONFIGS[name])


def test_a_log_file_that_was_given():
    config = make_config(TINY | {"log-file": "logs/x.json"})
    assert "--log-file=logs/x.json" in command_line(config)
    config = make_config(TINY | {"name": "a.b"})
    assert command_line(config) == ["llmq", "train", "--model=tiny", "--from-scratch", "--name=a.b"]


def test_flags():
    assert flag("recompute_ffn", True) == "--recompute-ffn"
    assert flag("recompute_ffn", False) == "--no-recompute-ffn"
    assert flag("lmhead_chunks", 4) == "--lmhead-chunks=4"
    assert flag("continue_from", "latest") == "--continue=latest"
