"""The folder that `tokenize` writes: resuming, one run at a time, other options, other files."""

from __future__ import annotations

import json
import os

import pytest

import llmq.data.tokens
import llmq.text.tokenize
from llmq.base.errors import DataError, LlmqError
from llmq.base.locks import LOCK, locked
from llmq.text.inputs import Portions
from llmq.text.token_shards import Manifest
from llmq.text.tokenizer import load_tokenizer
from tests.chat_templates import CHATML, assistant, user
from tests.text_data import (
    contents,
    documents,
    encoded,
    ids,
    interrupt_report,
    mixed_text,
    run,
    write_inputs,
    write_jsonl,
)


@pytest.fixture
def all_inputs(tmp_path):
    """An input file of each kind."""
    return write_inputs(tmp_path / "in")


class StopError(Exception):
    pass


# In small blocks; the state is saved after each.
SMALL = Portions(size=400, documents=4, seconds=0.0)
OPTIONS = {"eval_fraction": 0.2, "shard_tokens": 300, "portions": SMALL}
RECORDS = {  # of conversations and pairs; files of 301 tokens end within a byte of mask bits
    "conversations": [{"messages": [user("q" * i), assistant("a" * (i % 5))]} for i in range(17)],
    "pairs": [{"prompt": f"q{i}", "chosen": "a" * i, "rejected": "b"} for i in range(1, 18)],
}


@pytest.fixture(params=["texts", "a text", *RECORDS])
def made(request, tmp_path, bpe):
    """An input, and options of `run`. A text is cut for evaluation, and is one document."""
    if request.param == "texts":
        return write_inputs(tmp_path / "in"), OPTIONS | {"tokenizer": str(bpe)}
    if request.param == "a text":
        (tmp_path / "a.txt").write_text(mixed_text(5000))
        return tmp_path / "a.txt", OPTIONS
    (tmp_path / "t.jinja").write_text(CHATML)
    lines = (json.dumps(record) + "\n" for record in RECORDS[request.param])
    (tmp_path / "a.jsonl").write_text("".join(lines))
    small = SMALL._replace(documents=2)
    how = {"chat_template": str(tmp_path / "t.jinja"), "shard_tokens": 301, "portions": small}
    return tmp_path / "a.jsonl", OPTIONS | how


@pytest.mark.parametrize("save_seconds", [0.0, 1e9])
def test_resume_after_every_block(tmp_path, made, monkeypatch, save_seconds):
    """Killed again and again, the result is the same to the byte."""
    monkeypatch.setattr(Manifest, "discard_if_empty", lambda self: None)
    inputs, options = made
    options = options | {"portions": options["portions"]._replace(seconds=save_seconds)}
    whole = run(inputs, out=tmp_path / "whole", **options)
    interruptions, limit = 0, 0
    while True:
        # The state is saved after the report: 2 blocks a run are 1 block of progress. Without
        # saving, every run starts from the beginning and each goes a few blocks further.
        limit = 2 if save_seconds == 0 else limit + 4
        try:
            with monkeypatch.context() as patch:
                interrupt_report(patch, limit, StopError)
                summary = run(inputs, out=tmp_path / "out", **options)
            break
        except StopError:
            interruptions += 1
            manifest = json.loads((tmp_path / "out" / "tokenize.json").read_text())
            assert not manifest["complete"]
    assert interruptions > (5 if save_seconds == 0 else 1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list((tmp_path / "out").glob("*.partial"))
    assert summary.was_resumed == (save_seconds == 0)
    assert (summary.documents, summary.tokens) == (whole.documents, whole.tokens)
    assert (summary.counts, summary.warnings) == (whole.counts, whole.warnings)


def test_interrupted_while_finishing(tmp_path, made, monkeypatch):
    """Files have their final names and masks, but the manifest does not list these files yet."""
    inputs, options = made
    run(inputs, out=tmp_path / "whole", **options)
    save = Manifest.save

    def stop_at_the_end(manifest, position, shards, complete=False):
        if complete:
            raise KeyboardInterrupt
        save(manifest, position, shards)

    monkeypatch.setattr(Manifest, "save", stop_at_the_end)
    with pytest.raises(KeyboardInterrupt):
        run(inputs, out=tmp_path / "out", **options)
    assert (tmp_path / "out" / "train-000.bin").exists()
    monkeypatch.setattr(Manifest, "save", save)
    assert run(inputs, out=tmp_path / "out", **options).was_resumed
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_complete_run_is_left_alone(tmp_path, all_inputs):
    first = run(all_inputs, out=tmp_path / "out", **OPTIONS)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = run(all_inputs, out=tmp_path / "out", **OPTIONS)
    assert again.was_complete
    assert "had been written before" in again.describe()
    assert (again.tokens, again.files) == (first.tokens, first.files)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times
    first.files[0].unlink()
    with pytest.raises(DataError, match="files are missing"):
        run(all_inputs, out=tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"eval_fraction": 0.3}, "eval_fraction"),
        ({"shard_tokens": 301}, "shard_tokens"),
        ({"seed": 1}, "seed"),
        ({"field": "x"}, "field"),
    ],
)
def test_other_options_in_the_same_folder(tmp_path, change, named):
    write_jsonl(tmp_path / "a.jsonl", documents(30))
    run(tmp_path / "a.jsonl", out=tmp_path / "out", **OPTIONS)
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match=f"made with other {named}: .* --overwrite"):
        run(tmp_path / "a.jsonl", out=tmp_path / "out", **{**OPTIONS, **change})
    assert contents(tmp_path / "out") == before


def test_other_tokenizer_or_inputs_in_the_same_folder(tmp_path, bpe):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("some text " * 50)
    run(path, out=out, shard_tokens=100)
    with pytest.raises(DataError, match="other tokenizer"):
        run(path, out=out, shard_tokens=100, tokenizer=str(bpe))
    path.write_text("other text")
    with pytest.raises(DataError, match=r"other inputs \(1 files then, 1 now, or edited\)"):
        run(path, out=out, shard_tokens=100)
    run(path, out=out, tokenizer=str(bpe), overwrite=True)
    assert sorted(contents(out)) == ["train-000.bin", "train-000.docs"]  # the old run had more
    assert ids(out) == [*load_tokenizer(bpe).encode("other text"), 0]
    assert load_tokenizer(out / "tokenizer").fingerprint == load_tokenizer(bpe).fingerprint
    run(path, out=out, tokenizer=str(out / "tokenizer"), overwrite=True)  # uses its own copy
    run(path, out=out, overwrite=True)
    assert load_tokenizer(out / "tokenizer").encode("é") == [0xC3, 0xA9]


@pytest.mark.parametrize("content", ["[]", '{"options": 5, "inputs": []}', "[" * 100_000])
def test_a_damaged_manifest(tmp_path, content):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenize.json").write_text(content)
    with pytest.raises(DataError, match=r"cannot read '.*tokenize\.json': .*--overwrite"):
        run(tmp_path / "a.txt", out=tmp_path / "out")


def test_files_of_others_are_not_touched(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-000.bin").write_bytes(b"precious")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="of another origin"):
        run(tmp_path / "a.txt", out=tmp_path / "out")
    assert (tmp_path / "out" / "train-000.bin").read_bytes() == b"precious"
    run(tmp_path / "a.txt", out=tmp_path / "out", overwrite=True)
    assert ids(tmp_path / "out") == encoded("text")
    assert (tmp_path / "out" / "notes.txt").exists()


def test_two_runs_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "out"
    message = f"--out: '{out}' is in use by process {os.getpid()} on "
    with locked(out / LOCK, "--out", out), pytest.raises(LlmqError, match=message):
        run(tmp_path / "a.txt", out=out)
    run(tmp_path / "a.txt", out=out)
    assert not (out / LOCK).exists()


def test_full_disk_can_be_resumed(tmp_path, all_inputs, monkeypatch):
    run(all_inputs, out=tmp_path / "whole", **OPTIONS)
    write, calls = llmq.data.tokens.TokenWriter.write, 0

    def full(writer, tokens, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 20:
            writer._file.close()  # what was buffered is lost
            with llmq.data.tokens.disk_errors(writer.path):
                raise OSError(28, "No space left on device")
        write(writer, tokens, **kwargs)

    monkeypatch.setattr(llmq.data.tokens.TokenWriter, "write", full)
    with pytest.raises(LlmqError, match="disk is full"):
        run(all_inputs, out=tmp_path / "out", **OPTIONS)
    assert run(all_inputs, out=tmp_path / "out", **OPTIONS).was_resumed
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
