"""`llmq show`: documents as text or ids, what is trained of them, counts, and `counts.py`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmq.commands.cli import _run
from llmq.data.document_index import count_documents
from llmq.data.tokens import TokenFile, TokenWriter
from llmq.text.show import LONGEST
from tests.chat_templates import CHATML, assistant, user
from tests.text_data import run, write_jsonl

TALKS = [
    [user("hé"), assistant("cat")],
    [user("two"), assistant("one\n"), user("?"), assistant("漢")],
    [user("q" * 30), assistant("a")],
    [user("4"), assistant("5")],
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A folder with conversations as bytes."""
    folder = tmp_path_factory.mktemp("show")
    (folder / "t.jinja").write_text(CHATML)
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"messages": t}) for t in TALKS))
    run(folder / "a.jsonl", out=folder / "out", chat_template=str(folder / "t.jinja"))
    return folder / "out"


def show(capsys, *args):
    assert _run(["show", *map(str, args)]) == 0
    return capsys.readouterr().out


def test_text_with_marks(tokens, capsys):
    out = show(capsys, tokens)
    head = f"of 4 in {tokens}/train-000.bin: "
    assert out.startswith(
        f"--- document 1 {head}67 tokens, 14 trained ---\n"
        "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n⟦cat<|im_end|>\n⟧\n"
        f"--- document 2 {head}"
    )
    assert "⟦one\n<|im_end|>\n⟧<|im_start|>user" in out and "⟦漢<|im_end|>\n⟧" in out
    assert "--- document 3 " in out and "--- document 4 " not in out
    last = out.splitlines()[-4:]
    assert last[0] == "trained tokens: between ⟦ and ⟧"
    assert last[1] == "4 documents"
    assert last[3] == "without a trained token: 0"


def test_which_documents(tokens, capsys):
    def numbers(*args):
        return [x.split()[2] for x in show(capsys, tokens, *args).splitlines() if x[:4] == "--- "]

    assert numbers("--document", 4) == ["4"]
    assert numbers("--document", 2, "--limit", 2) == ["2", "3"]
    assert numbers("--limit", 99) == ["1", "2", "3", "4"]
    assert numbers("--limit", 0) == []
    assert numbers("--document", 1) == ["1"]
    # The numbers go on from file to file.
    assert numbers("--document", 8, tokens / "train-000.bin", tokens / "../out/train-000.bin") == [
        "8"
    ]


def test_ids(tokens, capsys):
    lines = show(capsys, tokens / "train-000.bin", "--ids", "--limit", 1).splitlines()
    assert lines[1] == "     0   60  -  '<'"
    assert lines[19:21] == ["    18  195  -  '\ufffd'", "    19  169  -  '\ufffd'"]
    assert lines[54] == "    53   99  +  'c'"
    assert lines[-4] == "trained tokens: lines with +"


def test_where_a_sequence_ends(tokens, capsys):
    out = show(capsys, tokens, "--seq-len", 55, "--document", 1)
    assert "assistant\n⟦ca⟧\n--- cut at --seq-len 55 ---\n⟦t<|im_end|>\n⟧\n" in out
    assert out.splitlines()[-2:] == ["longer than --seq-len 55: 4", "without a trained token: 1"]
    lines = show(capsys, tokens, "--seq-len", 55, "--limit", 1, "--ids").splitlines()
    assert lines[56] == "--- cut at --seq-len 55 ---"


def test_a_long_document(tmp_path, capsys):
    path = tmp_path / "x.bin"
    with TokenWriter(path, 257) as writer:
        writer.write([*b"x" * (LONGEST - 2), *b"yzgone", 256])
    out = show(capsys, path, "--tokenizer", "bytes", "--document-separator", 256)
    assert "xxyz\n--- 5 more tokens ---\n" in out.replace("⟧", "")


def test_control_characters_are_not_printed(tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", ["\x1b[2J"])
    run(tmp_path / "a.jsonl", out=tmp_path / "out")
    assert "\ufffd⟦[2J<|endoftext|>⟧" in show(capsys, tmp_path / "out")


def test_files_of_others(tmp_path, capsys):
    """Without documents and without a tokenizer."""
    path = tmp_path / "x.bin"
    with TokenWriter(path, 257) as writer:
        writer.write([*b"one", 256, *b"two", 256])
    for args, message in (
        ([], "nothing says which tokenizer made"),
        (["--tokenizer", "bytes"], "nothing says where the documents of"),
        (["--tokenizer", "bytes", "--document-separator", "256", "--document", "3"],
         "--document is 3: there are 2 documents"),
    ):  # fmt: skip
        assert _run(["show", str(path), *args]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and message in err
    out = show(capsys, path, "--tokenizer", "bytes", "--document-separator", 256)
    assert "--- document 2 of 2 " in out and "t⟦wo<|endoftext|>⟧" in out
    with TokenWriter(path, 300, with_documents=True) as writer:
        writer.write([299], ends=[1])
    assert _run(["show", str(path), "--tokenizer", "bytes"]) == 2
    assert "has a vocabulary of 300 tokens, the tokenizer only 257" in capsys.readouterr().err


def test_counts(tmp_path, rng):
    """Against a loop over documents."""
    lengths = rng.integers(1, 20, 30)
    masks = [rng.random(n) < 0.15 for n in lengths]
    with TokenWriter(tmp_path / "x.bin", 5, with_masks=True, with_documents=True) as writer:
        mask = np.concatenate(masks)
        writer.write(np.zeros(len(mask), np.int32), mask, ends=np.cumsum(lengths))
    for of_document in masks:
        of_document[0] = False  # nothing predicts it
    mask = np.concatenate(masks)
    files = [TokenFile(tmp_path / "x.bin")] * 2
    for seq_len in (None, 9):
        counts = count_documents(files, seq_len)
        untrained = sum(not m[:seq_len].any() for m in masks)
        assert 0 < untrained < 30
        assert (counts.documents, counts.tokens) == (60, 2 * lengths.sum())
        assert (counts.trained, counts.untrained) == (2 * mask.sum(), 2 * untrained)
        assert counts.longest == lengths.max()
        assert counts.cut == (None if seq_len is None else 2 * (lengths > 9).sum())
