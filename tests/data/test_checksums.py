"""`.sums` files: what they say, and that no damage of what they are of goes unnoticed."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash

from llmq.base.errors import DataError
from llmq.data import checksums
from llmq.data.checksums import PIECE_BYTES, checksums_path, find_token_files
from llmq.data.document_index import DocumentIndex
from llmq.data.loader import DataLoader
from llmq.data.tokens import TokenFile, TokenWriter
from tests.text_data import run, write_jsonl

TOKENS = 3 * PIECE_BYTES // 4  # with the header and masks more than three pieces


@pytest.fixture
def path(tmp_path):
    """A token file with masks, documents and checksums."""
    tokens = np.random.default_rng(0).integers(0, 1000, TOKENS)
    sides = {"with_masks": True, "with_documents": True, "with_checksums": True}
    with TokenWriter(tmp_path / "a.bin", 1000, **sides) as writer:
        writer.write(tokens, tokens % 2 == 0, ends=[1000, TOKENS - 5])
    return tmp_path / "a.bin"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def read_everything(path):
    file = TokenFile(path)
    try:
        return file.read_tokens(0, file.num_tokens), file.read_mask(0, file.num_tokens)
    finally:
        file.close()


def test_bytes_of_the_format(path):
    sum_of = xxhash.xxh3_64_intdigest
    content, docs = path.read_bytes(), path.with_suffix(".docs").read_bytes()
    pieces = [content[i : i + PIECE_BYTES] for i in range(0, len(content), PIECE_BYTES)]
    sums = struct.pack("<4Q", *map(sum_of, pieces))
    head = b"BIN.SUM\n" + struct.pack("<2i2q", 2, 65536, len(content), len(docs))
    head += struct.pack("<2Q", sum_of(docs), sum_of(sums))
    written = checksums_path(path).read_bytes()
    assert written == head + struct.pack("<Q", sum_of(head)) + sums


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"BIN.SUM\n\2", "is no file of checksums"),
        (b"BIN.SUM\n" + struct.pack("<i", 1) + bytes(44), "has version 1, only 2 can be read"),
        (b"BIN.SUM\n" + struct.pack("<i", 2), "is damaged"),
    ],
)
def test_what_is_no_sums_file(path, data, said):
    checksums_path(path).write_bytes(data)
    with pytest.raises(DataError, match=rf"^'.*a\.sums' {said}[^\n]*$"):
        TokenFile(path)


def test_tokenize_writes_them_and_patterns_leave_them_out(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["some text"] * 100)
    run(tmp_path / "a.jsonl", out=tmp_path / "out", shard_tokens=400, eval_fraction=0.1)
    files = find_token_files(tmp_path / "out" / "*-0*")
    assert [f.name for f in files] == ["eval-000.bin", "train-000.bin", "train-001.bin",
                                       "train-002.bin"]  # fmt: skip
    for file in files:
        read_everything(file)
        flip(file, -1)
        with pytest.raises(DataError, match="is damaged"):
            read_everything(file)
    run(tmp_path / "a.jsonl", out=tmp_path / "out", overwrite=True, eval_fraction=0.1)
    for file in find_token_files(tmp_path / "out" / "*-0*"):
        read_everything(file)
    names = sorted(p.name for p in (tmp_path / "out").glob("*.sums"))
    assert names == ["eval-000.sums", "train-000.sums"]


def test_a_flipped_bit_elsewhere_is_found_when_it_is_read(path):
    flip(path, 2 * PIECE_BYTES + 8)
    file = TokenFile(path)
    file.read_tokens(0, 1000)
    with pytest.raises(DataError, match="bytes 131072 to 196608"):
        file.read_tokens(2 * PIECE_BYTES // 4, 10)


@pytest.mark.parametrize("damaged", range(3))
def test_a_read_compares_each_of_its_pieces(path, damaged):
    """A read compares each of its pieces, also where others are known already."""
    flip(path, damaged * PIECE_BYTES + 1032)
    file = TokenFile(path)
    for piece in {0, 1, 2} - {damaged}:
        file.read_tokens(piece * PIECE_BYTES // 4, 10)
    begin = f"bytes {damaged * PIECE_BYTES} to"
    with pytest.raises(DataError, match=begin):
        file.read_tokens(0, 2 * PIECE_BYTES // 4 + 10)
    near = max(damaged * PIECE_BYTES // 4 - 300, 0)  # from shortly before it to its first bytes
    with pytest.raises(DataError, match=begin):
        file.read_tokens(near, 100)


def test_any_flipped_bit_of_the_other_files(path):
    docs, sums = path.parent / "a.docs", checksums_path(path)
    for other in (docs, sums):
        for at in range(other.stat().st_size):
            flip(other, at)
            with pytest.raises(DataError):
                DocumentIndex.read(path)
            flip(other, at)
    assert len(DocumentIndex.read(path)) == 3


def test_a_link_to_itself_is_no_absence(path):
    checksums_path(path).unlink()
    assert TokenFile(path).checksums is None
    checksums_path(path).symlink_to("a.sums")
    with pytest.raises(DataError, match=r"cannot read '.*a\.sums': Too many levels"):
        TokenFile(path)


def test_a_piece_is_compared_once(path, monkeypatch):
    compared = []
    real = checksums.Checksums._compare
    monkeypatch.setattr(
        *(checksums.Checksums, "_compare"),
        lambda self, file, index: (compared.append(index), real(self, file, index)),
    )
    for _ in range(2):  # also by another reader of the same file
        file = TokenFile(path)
        for start in range(0, TOKENS, 1000):
            file.read_tokens(start, min(1000, TOKENS - start))
        file.close()
    assert compared == [0, 1, 2, 3]


def test_a_file_that_another_program_has_written_anew(path):
    """With a `.sums` file that is not its own: an error that says what to do."""
    with TokenWriter(path.parent / "b.bin", 1000) as writer:
        writer.write(np.zeros(50, int))
    (path.parent / "b.bin").rename(path)
    with pytest.raises(DataError, match="or remove it if that file was not written by `llmq"):
        TokenFile(path)
    with TokenWriter(path, 1000) as writer:
        writer.write(np.zeros(50, int))
    assert len(read_everything(path)[0]) == 50, "ours removes it"


def loader(path):
    return DataLoader(path, seq_len=64, micro_batch=2, seed=1, vocab_size=1000)


@pytest.mark.parametrize("with_checksums", [False, True])
def test_another_file_of_equal_name_and_size_is_said(tmp_path, with_checksums, capsys):
    def write(seed):
        tokens = np.random.default_rng(seed).integers(0, 1000, 20000)
        with TokenWriter(tmp_path / "t.bin", 1000, with_checksums=with_checksums) as writer:
            writer.write(tokens)

    write(0)
    with loader(tmp_path / "t.bin") as batches:
        batches.next_batch()
        state = batches.state()
    with loader(tmp_path / "t.bin") as batches:
        batches.set_state(state)
    assert capsys.readouterr().err == ""
    write(1)
    with loader(tmp_path / "t.bin") as batches:
        batches.set_state(state)
        line = "warning: the content of the training files changed since the checkpoint: "
        assert capsys.readouterr().err.startswith(line)
        del state["contents"]  # of a checkpoint of an earlier version
        batches.set_state(state)
        assert capsys.readouterr().err == ""
