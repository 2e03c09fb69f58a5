"""Documents' places: written beside token files, checked against them, found by a separator."""

from __future__ import annotations

import struct
from unittest.mock import Mock

import numpy as np
import pytest

from llmq.base.errors import DataError
from llmq.data.document_file import documents_path, partial_path
from llmq.data.document_index import _SCAN_TOKENS, DocumentIndex
from llmq.data.tokens import TokenFile, TokenWriter, open_token_files


def write(path, *lengths, cut=0):
    """A file of documents of these lengths, whose tokens count up, and `cut` tokens of another."""
    with TokenWriter(path, 1000, with_documents=True) as writer:
        writer.write(np.arange(sum(lengths) + cut), ends=np.cumsum(lengths))
    return path


def read(path, separator=None):
    index = DocumentIndex.read(path, separator)
    return index.offsets.tolist(), index.is_cut


def patch(path, offset, fmt, value):
    data = bytearray(path.read_bytes())
    struct.pack_into(fmt, data, offset, value)
    path.write_bytes(data)


def test_bytes_of_the_format(tmp_path):
    data = documents_path(write(tmp_path / "a.bin", 2, 3, cut=4)).read_bytes()
    assert documents_path(tmp_path / "a.bin") == tmp_path / "a.docs"
    assert data[:8] == b"BIN.DOC\n"
    assert struct.unpack("<2i2q", data[8:32]) == (1, 1, 9, 3)
    assert data[36:64] == b"*" * 27 + b"\n"
    assert data[64:] == struct.pack("<3q", 2, 5, 9)


def test_an_empty_file(tmp_path):
    write(tmp_path / "a.bin")
    assert read(tmp_path / "a.bin") == ([0], False)


@pytest.mark.parametrize("ends", [[3, 2], [-1], [5]])
def test_bad_ends(tmp_path, ends):
    with (
        TokenWriter(tmp_path / "a.bin", 1000, with_documents=True) as writer,
        pytest.raises(ValueError, match="ends must rise within the tokens"),
    ):
        writer.write(np.arange(4), ends=ends)
    with (
        TokenWriter(tmp_path / "b.bin", 1000) as writer,
        pytest.raises(ValueError, match="need with_documents"),
    ):
        writer.write(np.arange(4), ends=[4])


def test_a_new_file_without_documents_leaves_none_of_the_old_one(tmp_path):
    write(tmp_path / "a.bin", 3)
    with TokenWriter(tmp_path / "a.bin", 1000) as writer:
        writer.write(np.arange(3))
    with pytest.raises(DataError, match="nothing says where the documents"):
        DocumentIndex.read(tmp_path / "a.bin")


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("keep", [4, 5, 6, 9])
def test_continue_a_partial_file(tmp_path, keep, complete):
    """Wherever it is cut, also if it was complete before: its end was no document's."""
    lengths = [2, 3, 1]
    writer = TokenWriter(tmp_path / "a.bin", 1000, with_documents=True)
    writer.write(np.arange(9), ends=np.cumsum(lengths))
    writer.sync()
    if complete:
        writer.close()
        for path in (tmp_path / "a.bin", tmp_path / "a.docs"):
            path.rename(partial_path(path))
    else:
        writer.write(np.arange(7), ends=[1, 2, 3])  # dropped
        writer.suspend()
    with TokenWriter(tmp_path / "a.bin", 1000, with_documents=True, keep_tokens=keep) as writer:
        writer.write(np.arange(keep, 20), ends=[20 - keep])
    kept = [end for end in np.cumsum(lengths).tolist() if end <= keep]
    assert read(tmp_path / "a.bin") == ([0, *kept, 20], False)


def test_discarded_on_error(tmp_path):
    with (
        pytest.raises(KeyError),
        TokenWriter(tmp_path / "a.bin", 10, with_documents=True) as writer,
    ):
        writer.write([1], ends=[1])
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_does_not_take_it_for_tokens(tmp_path):
    write(tmp_path / "a.bin", 3)
    assert [file.path.name for file in open_token_files(tmp_path / "a*")] == ["a.bin"]


# ------------------------------------------------------------------------------------------------
# What contradicts the token file


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "message"),
    [
        (0, "<i", 7, "does not say where documents are"),
        (8, "<i", 3, "version 3"),
        (8, "<i", 2, "it is of pairs, and one of them lacks its end"),
        (16, "<q", 8, "contradicts '.*a.bin': it is of 8 tokens, the file has 9"),
        (24, "<q", 4, "is truncated: 88 bytes, but its header says 4 documents = 96 bytes"),
        (24, "<q", 2, "is too long"),
        (32, "<I", 12345, "it was written for other tokens"),
        (64, "<q", 0, "document 0 would end at 0 and begin at 0"),
        (64, "<q", 6, "document 1 would end at 5 and begin at 6"),
        (80, "<q", 10, "its documents end at 10, the file at 9"),
        (80, "<q", 8, "its documents end at 8, the file at 9"),
    ],
)
def test_contradictions(tmp_path, offset, fmt, value, message):
    write(tmp_path / "a.bin", 2, 3, 4)
    patch(tmp_path / "a.docs", offset, fmt, value)
    with pytest.raises(DataError, match=message) as error:
        DocumentIndex.read(tmp_path / "a.bin")
    assert str(tmp_path / "a.docs") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("length", [0, 5, 63, 64, 87])
def test_truncated(tmp_path, length):
    write(tmp_path / "a.bin", 2, 3, 4)
    path = tmp_path / "a.docs"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match="does not say" if length < 64 else "is truncated"):
        DocumentIndex.read(tmp_path / "a.bin")


def test_of_another_file_of_the_same_length(tmp_path):
    write(tmp_path / "a.bin", 2, 3, 4)
    with TokenWriter(tmp_path / "b.bin", 1000) as writer:
        writer.write(np.arange(9)[::-1])
    (tmp_path / "a.docs").rename(tmp_path / "b.docs")
    with pytest.raises(DataError, match=r"b\.docs' contradicts '.*b\.bin': .* for other tokens"):
        DocumentIndex.read(tmp_path / "b.bin")


def test_a_renamed_file_says_what_to_do(tmp_path):
    path = write(tmp_path / "a.bin", 2, 3).rename(tmp_path / "renamed.bin")
    with pytest.raises(DataError, match=r"rename its 'renamed\.docs' along .*--document-separator"):
        DocumentIndex.read(path)


# ------------------------------------------------------------------------------------------------
# Without the file: a separator


def test_found_by_a_separator(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    with TokenWriter(path, 1000) as writer:
        writer.write(np.ones(_SCAN_TOKENS - 3, np.int32))
        writer.write([1, 2, 7, 7, 3, 7, 4])
    found = [0, *(_SCAN_TOKENS + n for n in (0, 1, 3, 4))]
    assert read(path, 7) == (found, True)
    monkeypatch.setattr(TokenFile, "read_tokens", Mock(side_effect=EOFError))
    assert read(path, 7) == (found, True)  # remembered
    with pytest.raises(EOFError):  # another separator is looked for
        read(path, 3)
    monkeypatch.undo()
    with pytest.raises(DataError, match="--document-separator: token 5 is nowhere in"):
        DocumentIndex.read(path, 5)
    with TokenWriter(path, 1000) as writer:
        writer.write([1, 7])
    assert read(path, 7) == ([0, 2], False)  # not those of the file before


def test_what_is_written_wins_over_the_separator(tmp_path):
    assert read(write(tmp_path / "a.bin", 2, 3), separator=1) == ([0, 2, 5], False)


# ------------------------------------------------------------------------------------------------
# What `tokenize` writes
