"""`tokenize`: splits, shards, workers, options, progress."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

import llmq.report.views
import llmq.text.tokenize
from llmq.base.errors import ConfigError, DataError
from llmq.data.tokens import TokenFile, open_token_files
from llmq.text.inputs import InputSource, Portions
from llmq.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.text_data import (
    EOS,
    contents,
    documents,
    encoded,
    ids,
    mixed_text,
    run,
    write_inputs,
    write_jsonl,
)


def test_shards_are_filled(tmp_path):
    texts = documents(50)
    write_jsonl(tmp_path / "a.jsonl", texts)
    summary = run(tmp_path / "a.jsonl", out=tmp_path / "out", shard_tokens=500)
    sizes = [file.num_tokens for file in open_token_files(tmp_path / "out" / "train*.bin")]
    total = summary.tokens["train"]
    assert sizes == [500] * (total // 500) + [total % 500]
    assert ids(tmp_path / "out") == encoded(*texts)
    assert [path.name for path in summary.files[:2]] == ["train-000.bin", "train-001.bin"]


def test_last_shard_may_be_full(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 99)
    summary = run(tmp_path / "a.txt", out=tmp_path / "out", shard_tokens=50)
    assert [TokenFile(path).num_tokens for path in summary.files] == [50, 50]


@pytest.mark.parametrize("fraction", [0.1, 0.03, 0.5, 0.9])
def test_eval_documents(tmp_path, fraction):
    texts = [f"document {i}" for i in range(200)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    train = {}
    for seed in (0, 1):
        out = tmp_path / f"out{seed}"
        summary = run(tmp_path / "a.jsonl", out=out, eval_fraction=fraction, seed=seed)
        by_split = {
            split: bytes(t if t != EOS else 0 for t in ids(out, split)).decode().split("\0")[:-1]
            for split in ("train", "eval")
        }
        assert sorted(by_split["train"] + by_split["eval"]) == sorted(texts)
        assert by_split["eval"] == [text for text in texts if text in set(by_split["eval"])]
        assert abs(len(by_split["eval"]) - 200 * fraction) < 1
        assert summary.tokens["eval"] == len(ids(out, "eval"))
        train[seed] = by_split["train"]
    assert train[0] != train[1]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("fraction", [0.0001, 0.02, 0.3, 0.6, 0.99, 0.9999999])
def test_two_documents_are_enough_for_both_parts(tmp_path, fraction, count):
    for seed in range(3):
        write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(count)])
        out = tmp_path / str(seed)
        summary = run(tmp_path / "a.jsonl", out=out, eval_fraction=fraction, seed=seed)
        assert summary.tokens["train"] and summary.tokens["eval"] and not summary.warnings
        if fraction * count <= 1:
            assert ids(out, "eval") == encoded("document 1")


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_single_text_is_split_by_position(tmp_path, fraction):
    small = Portions(size=1000)
    text = "".join(f"line {i} of the text\n" for i in range(500))
    (tmp_path / "a.txt").write_text(text)
    summary = run(tmp_path / "a.txt", out=tmp_path / "out", eval_fraction=fraction, portions=small)
    train, evaluation = ids(tmp_path / "out"), ids(tmp_path / "out", "eval")
    assert train + evaluation == encoded(text)  # the end of the text only at its end
    assert train[-1] == ord("\n")
    assert 0 <= len(evaluation) - 1 - len(text) * fraction < 25  # from the next line on
    assert summary.documents == 1


def test_too_few_documents_for_an_eval_split(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    summary = run(tmp_path / "a.jsonl", out=tmp_path / "out", eval_fraction=0.0001)
    assert summary.warnings == ["no tokens for eval: 1 documents with --eval-fraction 0.0001"]
    assert "warning: no tokens for eval" in summary.describe()


# ------------------------------------------------------------------------------------------------
# Workers


def test_workers_do_not_change_the_result(tmp_path, bpe):
    small = Portions(documents=7)
    write_jsonl(tmp_path / "a.jsonl", documents(100))
    (tmp_path / "b.txt").write_text(mixed_text(3000))
    for workers in (1, 2):
        run(
            *(tmp_path / "a.jsonl", tmp_path / "b.txt"),
            out=tmp_path / str(workers),
            tokenizer=str(bpe),
            workers=workers,
            eval_fraction=0.1,
            shard_tokens=700,
            portions=small,
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert len(contents(tmp_path / "1")) > 4


def test_error_in_a_worker(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n{"text": bad}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:3: not readable as JSON") as error:
        run(path, out=tmp_path / "out", workers=2)
    assert "\n" not in str(error.value)


KILLED = """
import time
from llmq.text.inputs import Block, DocumentPart, Position
from llmq.base.worker import Bounds
from llmq.text.encode import Encoder, Recipe, encode_in_workers
from llmq.text.record_format import RecordText
from llmq.text.tokenizer import ByteTokenizer
if __name__ == "__main__":
    block = Block([DocumentPart("text", False, True, "")], Position())
    recipe = Recipe("bytes", RecordText("text", None), ([], []))
    encoder = Encoder(ByteTokenizer(), recipe)
    encoded = encode_in_workers(iter([block] * 9), encoder, 2, Bounds())
    next(encoded)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.kill()
    deadline = time.monotonic() + 20
    while any(map(is_running, children)):
        assert time.monotonic() < deadline, "a worker goes on"
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_field_of_plain_text(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    summary = run(tmp_path / "a.txt", out=tmp_path / "out", field="body")
    assert summary.warnings == ["--field body has no effect: all inputs are plain text"]


def test_number_of_workers(monkeypatch, bpe):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 64, raising=False)
    small, large = (InputSource("a", "text", size, 0, False) for size in (1000, 10**9))
    choose = llmq.text.tokenize._default_workers
    assert choose([large], load_tokenizer(bpe)) == 16
    assert choose([small, small], load_tokenizer(bpe)) == 1
    assert choose([large], ByteTokenizer()) == 1


# ------------------------------------------------------------------------------------------------
# Options and progress


@pytest.mark.parametrize(
    "wrong", [{"eval_fraction": 1.0}, {"eval_fraction": -0.1}, {"shard_tokens": 0}, {"workers": 0}]
)
def test_bad_options(tmp_path, wrong):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong)).replace('_', '-')} is"):
        run(tmp_path / "a.txt", out=tmp_path / "out", **wrong)


def test_tokenizer_without_an_end(tmp_path):
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    (tmp_path / "t").mkdir()
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="names no end-of-text token"):
        run(tmp_path / "a.txt", out=tmp_path / "out", tokenizer=str(tmp_path / "t"))


def test_progress_lines_without_a_terminal(tmp_path, monkeypatch, capsys):
    small = Portions(size=400, documents=4)
    monkeypatch.setattr(llmq.report.views, "REPORT_SECONDS", 0.0)
    summary = run(
        write_inputs(tmp_path / "in"), out=tmp_path / "out", progress=True, portions=small
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 10
    assert lines[-1].startswith("tokenize 100.0% | 0.0M tokens")
    percents = [float(line.split()[1].rstrip("%")) for line in lines]
    assert percents == sorted(percents)
    assert f"{summary.tokens['train']} tokens in" in summary.describe()


def test_progress_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    (tmp_path / "a.txt").write_text("text " * 1000)
    run(tmp_path / "a.txt", out=tmp_path / "out", progress=True)
    output = capsys.readouterr().err
    assert "100%" in output
    assert "0.0M tokens" in output
