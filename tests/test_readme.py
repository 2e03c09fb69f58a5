"""The README's Python example runs as it stands; its test command is the one that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

from llmq.data.tokenize import tokenize

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = Path(re.__file__).read_text() * 2
    Path("mine.txt").write_text(text)
    tokenize(["mine.txt"], tokenizer="bytes", out=Path("data/mine"), eval_fraction=0.2, workers=1)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    loss = float(re.search(r"^loss ([\d.]+), gradient norm", printed, re.MULTILINE)[1])
    assert 1.0 < loss < 5.0  # ln 257 = 5.5 before training
    assert "validation loss" in printed
    assert (tmp_path / "output/example/model.safetensors").is_file()


def test_ci_runs_the_readme_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    tests = re.search(r'^ +pip install "\.\[test\]" && (pytest.*)$', README, re.MULTILINE)[1]
    assert re.search(r'^pip install .*"\.\[test\]"$', ci, re.MULTILINE)
    assert tests in ci.splitlines()
