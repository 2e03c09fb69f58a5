"""`llmq demo` from end to end, on little text and for a few steps."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from llmq.base.errors import DataError
from llmq.commands.cli import _run
from llmq.run import demo
from llmq.run.demo import PROMPT, demo_config, python_sources
from tests.runs import records, signal_after


@pytest.fixture
def little_text(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    files = python_sources()
    small = [name for name in files if Path(name).stat().st_size < 20_000][:20]
    monkeypatch.setattr(demo, "python_sources", lambda: small)
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    monkeypatch.setattr(demo, "HELD_OUT", 1024)


def test_sources_are_pythons_own():
    files = python_sources()
    assert len(files) > 50
    assert all(Path(name).suffix == ".py" for name in files)
    assert str(Path(sysconfig.get_path("stdlib")) / "this.py") in files


def test_python_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="has no Python sources: use `llmq tokenize`"):
        python_sources()


def test_demo(little_text, capsys):
    """Into a folder whose name looks like a pattern."""
    folder = Path("a [1]{b,c}*")
    assert _run(["demo", "--out", f"{folder}", "--steps", "3", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    before, after = out.index("--- Before training:\n"), out.index("--- After training:\n")
    assert before < out.index("[T] step     2") < out.index("Done. validation loss") < after
    assert out.count(f":\n{PROMPT}") == 2
    assert f"wrote {folder}/loss.png\n" in out
    assert re.search(r"The held-out module takes \d\.\d\d nats a byte\.\n", out)
    last = out.splitlines()[-2:]
    assert last == [f"  llmq sample '{folder}/model' --prompt 'import '", "  llmq finetune --help"]
    names = {path.name for path in folder.iterdir()}
    assert names == {"data", "model", "ckpt", "log.json", "loss.png"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(records("step", folder / "log.json")) == 3
    assert _run(["sample", f"{folder}/model", "--max-new-tokens", "2", "--device", "cpu"]) == 0


def test_demo_goes_on(little_text, monkeypatch, capsys):
    """It was stopped; and for more steps; --continue of none is a new one."""
    demo = ["demo", "--out", "here", "--device", "cpu", "--continue"]
    with monkeypatch.context() as patch:
        signal_after(patch, 1)
        assert _run([*demo, "--steps", "3"]) == 130
    assert "no complete checkpoint in 'here/ckpt', starting from" in capsys.readouterr().err
    assert _run(demo) == 0
    out = capsys.readouterr().out
    assert "Before training" not in out and "2 of these steps are done already" in out
    assert _run([*demo, "--steps", "4"]) == 0
    assert "--steps is 4, in the checkpoint's run it was 3" in capsys.readouterr().err
    assert [r["step"] for r in records("step", "here/log.json")] == [0, 1, 2, 3]
    first, *others = (r["run"]["id"] for r in records("cmd", "here/log.json"))
    assert others == [first] * 2
    assert _run([*demo[:-1], "--steps", "1"]) == 0
    assert records("cmd", "here/log.json")[0]["run"]["id"] != first
    assert [path.name for path in Path("here/ckpt").iterdir()] == ["step_00000001"]


def test_a_demo_does_not_replace_another_run(little_text, capsys):
    Path("here/model").mkdir(parents=True)
    Path("here/model/model.safetensors").write_text("mine")
    assert _run(["demo", "--out", "here", "--device", "cpu", "--steps", "1"]) == 2
    assert "is of a run without an id" in capsys.readouterr().err
    assert Path("here/model/model.safetensors").read_text() == "mine"


def test_a_validation_shows_how_far_it_is(little_text, monkeypatch, capsys):
    monkeypatch.setattr("llmq.report.views.PROGRESS_SECONDS", 0.0)
    assert _run(["demo", "--out", "here", "--device", "cpu", "--steps", "1"]) == 0
    assert "  validation: 0%\n" in capsys.readouterr().out


def test_a_gpu_gets_more_steps_and_bf16():
    host = demo_config(Path("d"), "auto", "host", None)
    cuda = demo_config(Path("d"), "auto", "cuda", None)
    assert (host.model_dtype, cuda.model_dtype) == ("fp32", "bf16")
    assert host.steps < cuda.steps
    assert demo_config(Path("d"), "auto", "cuda", 7).steps == 7
    assert (host.optimizer, host.lr_schedule, host.final_lr_fraction) == ("muon", "cosine", 0)
