"""--save-config: the options of a command as a file that --config reads."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml

from llmq.base.errors import ConfigError, LlmqError
from llmq.commands.cli import _run
from llmq.options.option_file import read_option_file, save_options
from llmq.options.options import ONCE, OPTIONS, TrainConfig
from llmq.options.options_io import make_config
from tests.options.test_command_line import CONFIGS, TINY

STRANGE = {"name": "off", "train-file": "data/ä: #1*.bin", "out-dir": "1e3", "p2p": "on"}


@pytest.mark.parametrize("name", [*CONFIGS, "strange"])
def test_back_through_the_file(tmp_path, name):
    config = make_config(TINY | (CONFIGS | {"strange": STRANGE})[name])
    file = tmp_path / "run.yaml"
    save_options(file, config)
    read = make_config({}, file)
    assert {n for n in OPTIONS if getattr(read, n) != getattr(config, n)} <= {*ONCE, "log_file"}
    assert not {"continue", "overwrite", "new-data"} & read_option_file(file).keys()


def test_what_is_not_set_are_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    save_options(file, make_config(TINY))
    unset = re.findall(r"^#([\w-]+:.*)$", file.read_text(), flags=re.MULTILINE)
    values = yaml.safe_load("\n".join(unset))
    assert len(values) == len(OPTIONS) - len(ONCE) - len(TINY)
    for name, option in OPTIONS.items():
        value, default = values.get(option.flags[0]), getattr(TrainConfig(), name)
        if value is None:
            assert default is None or name in (*ONCE, "model", "from_scratch")
        else:
            assert option.convert(value) == default


def test_every_option_has_a_comment(tmp_path):
    file = tmp_path / "run.yaml"
    save_options(file, make_config(TINY))
    lines = file.read_text().splitlines()
    assert max(map(len, lines)) <= 100
    for name, option in OPTIONS.items():
        if name in ONCE:
            continue
        (at,) = (i for i, line in enumerate(lines) if re.match(f"#?{option.flags[0]}:", line))
        assert lines[at - 1].startswith("# ")
        first = re.sub(r"\W.*", "", option.help)
        assert any(first in line for line in lines[max(0, at - 12) : at])
    assert "model: tiny" in lines and "#warmup: 0" in lines
    assert "# ------" in file.read_text() and f" {OPTIONS['warmup'].group} -" in file.read_text()


def test_commands_write_it_and_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = ["--model=tiny", "--from-scratch", "--device=cpu", "--seq-len=64"]
    assert _run(["train", *tiny, "--dry-run", "--batch-size=2", "--save-config=a/train.yaml"]) == 0
    assert "[Plan]" in capsys.readouterr().out
    written = {"model": "tiny", "from-scratch": True, "device": "cpu", "seq-len": 64}
    assert read_option_file(Path("a/train.yaml")) == written | {"batch-size": 2}
    started = []
    monkeypatch.setattr("llmq.run.training.run_training", lambda config, *_: started.append(config))
    again = ["train", "--config=a/train.yaml", "--batch-size=1"]
    assert _run([*again, "--save-config=b.yaml", "--log-file=x.json"]) == 0
    assert started[0].batch_size == 1
    saved = read_option_file(Path("b.yaml"))
    assert saved == written | {"batch-size": 1, "log-file": "x.json"}
    assert _run(["plan", *tiny, "--save-config=plan.yml"]) == 0
    assert read_option_file(Path("plan.yml")) == written
    fit = ["plan", *tiny[:2], "--fit", "--card=4090", "--host-memory=16GiB", "--seq-len=64"]
    assert _run([*fit, "--save-config=fit.yaml"]) == 0
    first = re.search(r"^   llmq train (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    flags = {f.split("=")[0].removeprefix("--") for f in first.split()}
    assert {n.removeprefix("no-") for n in flags} == set(read_option_file(Path("fit.yaml")))


def test_verify_and_bench_write_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llmq.bench.verify.run_verify", lambda *_, **__: True)
    monkeypatch.setattr("llmq.bench.bench.run_bench", lambda *_, **__: None)
    tiny = ["--model=tiny", "--from-scratch", "--recompute-att"]
    for command in ("verify", "bench"):
        assert _run([command, *tiny, f"--save-config={command}.yaml"]) == 0
        assert read_option_file(Path(f"{command}.yaml"))["recompute-att"] is True
    Path("two.yaml").write_text("model: tiny\nbatch-size: [1, 2]\n")
    assert _run(["bench", "--config=two.yaml", "--save-config=of-two.yaml"]) == 2
    assert "holds the options of one run, but these are 2" in capsys.readouterr().err
    assert not Path("of-two.yaml").exists()


def test_files_that_are_not_written(tmp_path):
    config = make_config(TINY)
    for name in ("a.json", "a.toml", "a"):
        with pytest.raises(ConfigError, match=r"must end in \.yaml or \.yml"):
            save_options(tmp_path / name, config)
    file = tmp_path / "a.yaml"
    save_options(file, config)
    save_options(file, dataclasses.replace(config, continue_from="latest"))  # the same run
    with pytest.raises(ConfigError, match=r"holds other options: delete it, or choose another"):
        save_options(file, make_config(TINY | {"steps": 3}))
    assert os.listdir(tmp_path) == ["a.yaml"]
    with pytest.raises(LlmqError, match="Is a directory"):
        (tmp_path / "b.yaml").mkdir()
        save_options(tmp_path / "b.yaml", config)
