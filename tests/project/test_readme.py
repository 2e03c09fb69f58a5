"""README: its example runs as it stands, its commands are CI's, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmq.run.run_paths import find_log
from llmq.text.tokenize import tokenize
from tools import indexes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "llmq"
README = (ROOT / "README.md").read_text()


def test_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = Path(re.__file__).read_text() * 2
    Path("mine.txt").write_text(text)
    tokenize(["mine.txt"], tokenizer="bytes", out=Path("data/mine"), eval_fraction=0.1, workers=1)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    loss = float(re.search(r"^loss ([\d.]+), gradient norm", printed, re.MULTILINE)[1])
    assert 1.0 < loss < 5.0  # ln 257 = 5.5 before training
    assert "validation loss" in printed
    assert (tmp_path / "output/example/model.safetensors").is_file()
    assert find_log("example").is_file()


def test_ci_runs_the_readme_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    tests = re.search(r'^ +pip install "\.\[test\]" && (pytest.*)$', README, re.MULTILINE)[1]
    assert re.search(r'^(\S+ uv )?pip install .*"\.\[test\]"$', ci, re.MULTILINE)
    # Without what has just run with another processor's sums.
    assert re.search(rf"^{re.escape(tests)}( \$\(of ops .*)?$", ci, re.MULTILINE)


def test_readme_is_short_and_links_every_page():
    assert len(README.splitlines()) <= 245
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    assert pages <= set(re.findall(r"\]\(([^)]+)\)", README))


def test_links_lead_to_what_exists():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = page.parent / path if path else page
            assert target.exists(), (page, link)
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else []
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert not anchor or anchor in slugs, (page, link)


def test_decisions_are_short_and_all_are_listed():
    for page in ROOT.glob("docs/decisions/*.md"):
        for entry in indexes.entries(page):
            assert entry.lines <= 10, (page, entry.title)
    assert indexes.DECISIONS.read_text() == indexes.decisions(), "run tools/indexes.py"


def test_all_results_are_listed():
    assert indexes.BENCHMARKS.read_text() == indexes.benchmarks(), "run tools/indexes.py"


def test_the_walkthrough_can_be_read_at_once():
    assert len((ROOT / "docs" / "walkthrough.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", ["extending.md", "walkthrough.md"])
def test_paths_in_the_text_exist(page):
    """From the root or from llmq/; NAME and ROOM stand for any."""
    text = (ROOT / "docs" / page).read_text()
    paths = re.findall(r"`([\w./]+(?:/|\.(?:py|cuh?|md|sh|yaml|txt)|/run))`", text)
    assert len(paths) > 30
    for path in paths:
        pattern = path.replace("NAME", "*").replace("ROOM", "*")
        assert [*ROOT.glob(pattern), *PACKAGE.glob(pattern)], path


@pytest.mark.parametrize("page", ["extending.md", "walkthrough.md"])
def test_names_in_the_text_exist(page):
    """Names of functions, classes and constants are words of the code that are not in comments
    alone."""
    files = [p for room in ("llmq", "tests", "tools") for p in (ROOT / room).rglob("*.*")]
    kept, said = {".py", ".cu", ".cuh"}, re.compile(r"(#|//) .*")
    codes = [said.sub("", p.read_text()) for p in files if p.suffix in kept]
    words = {word for code in codes for word in re.findall(r"\w+", code)}
    names = re.findall(r"`([A-Za-z_][\w.]*)`", (ROOT / "docs" / page).read_text())
    assert len(names) > 30
    assert {name.split(".")[-1] for name in names if "/" not in name} <= words
