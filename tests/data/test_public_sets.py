"""`llmq data`: what it fetches from a stand-in of the real place, and what is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmq.commands.cli import _run
from llmq.data import public_sets
from llmq.data.public_sets import SETS, blob_hash

TEXT = "To be, or not to be, that is the question:\n" * 400


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The sets with small contents, below a folder that is named instead of the real place."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("LLMQ_DATA_ENDPOINT", (tmp_path / "there").as_uri())
    questions = json.dumps({"ctx_a": "A", "ctx_b": "b", "endings": ["c", "d"]}) + "\n"
    pairs = json.dumps([{"instruction": "Say a.", "output": "a"}] * 30)
    for name, text in {"tiny-shakespeare": TEXT, "hellaswag": questions, "alpaca": pairs}.items():
        found = replace(SETS[name], blob=blob_hash(text.encode()))
        monkeypatch.setitem(SETS, name, found)
        file = tmp_path / "there" / found.file
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return tmp_path / "there"


def test_the_default_training_files_are_made(place, capsys):
    """The error without them says how, and the output says by which command a run trains."""
    start = ["train", "--model=tiny", "--from-scratch", "--device=cpu", "--seq-len=64", "--steps=1"]
    start += ["--model-dtype=fp32", "--batch-size=1", "--grad-accumulation=1"]
    assert _run(start) == 2
    assert "`llmq data tiny-shakespeare` makes this" in capsys.readouterr().err
    assert (
        _run(["data", "tiny-shakespeare", "--tokenizer=bytes", "--out=data/tiny-shakespeare-qwen"])
        == 0
    )
    assert "--train-file 'data/tiny-shakespeare-qwen/train*.bin'" in capsys.readouterr().out
    assert _run(start) == 0


def test_what_is_there_is_not_fetched_again(place, capsys):
    assert _run(["data", "hellaswag"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("Downloading file:") and "--task data/hellaswag.jsonl" in out
    assert _run(["data", "hellaswag"]) == 0
    assert capsys.readouterr().err == ""
    Path("data/hellaswag.jsonl").write_text("damaged")
    assert _run(["data", "hellaswag"]) == 0
    assert Path("data/hellaswag.jsonl").read_text().startswith('{"ctx_a"')


def test_what_is_not_as_published_is_refused(place, monkeypatch, capsys):
    monkeypatch.setitem(SETS, "alpaca", replace(SETS["alpaca"], blob="0" * 40))
    assert _run(["data", "alpaca"]) == 2
    assert "is not the file that was published" in capsys.readouterr().err
    assert not Path("data").exists()
    monkeypatch.setenv("LLMQ_DATA_ENDPOINT", (place / "nothing").as_uri())
    assert _run(["data", "alpaca"]) == 2
    assert "cannot fetch" in (err := capsys.readouterr().err) and "'data/alpaca.json'" in err
    assert _run(["data", "shakespeare"]) == 2
    assert "  tiny-shakespeare: " in capsys.readouterr().err


def test_hashes_are_those_of_git():
    assert blob_hash(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    for found in public_sets.SETS.values():
        assert len(found.blob) == len(found.file.split("/")[2]) == 40
