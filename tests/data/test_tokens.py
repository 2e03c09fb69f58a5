"""Token files: the bytes of the format, every check at opening, glob patterns, atomic writing."""

from __future__ import annotations

import errno
import struct

import numpy as np
import pytest

from llmq.base.errors import DataError, LlmqError
from llmq.base.files import expand_pattern
from llmq.data.tokens import TokenFile, TokenWriter, open_token_files, partial_path


def write(path, tokens, vocab_size=100, mask=None):
    with TokenWriter(path, vocab_size, with_masks=mask is not None) as writer:
        writer.write(np.asarray(tokens), mask)
    return path


def patch(path, offset, fmt, value):
    data = bytearray(path.read_bytes())
    struct.pack_into(fmt, data, offset, value)
    path.write_bytes(data)


def test_bytes_of_the_format(tmp_path):
    data = write(tmp_path / "a.bin", [5, 6, 99]).read_bytes()
    assert data[:8] == b"BIN.TOK\n"
    assert struct.unpack("<5i", data[8:28]) == (2, 4, 3, 100, 0)
    assert data[28:1023] == b"*" * 995
    assert data[1023:1024] == b"\n"
    assert data[1024:] == struct.pack("<3i", 5, 6, 99)


def test_bytes_of_masks(tmp_path):
    mask = np.array([1, 0, 0, 1, 0, 0, 0, 0, 1, 1], bool)
    data = write(tmp_path / "a.bin", range(10), mask=mask).read_bytes()
    assert struct.unpack("<i", data[24:28]) == (1,)
    assert data[1024 + 40 :] == bytes([0b00001001, 0b00000011])


def test_reads_any_range(tmp_path):
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 100, 77), rng.random(77) < 0.5
    file = TokenFile(write(tmp_path / "a.bin", tokens, mask=mask))
    assert (file.num_tokens, file.vocab_size, file.version, file.has_masks) == (77, 100, 2, True)
    for start in range(77):
        for count in (0, 1, 7, 8, 9, 77 - start):
            count = min(count, 77 - start)
            np.testing.assert_array_equal(
                file.read_tokens(start, count), tokens[start : start + count]
            )
            np.testing.assert_array_equal(file.read_mask(start, count), mask[start : start + count])
    assert file.read_tokens(0, 3).dtype == np.int32
    file.close()
    assert len(file.read_tokens(0, 2)) == 2  # opens again


def test_without_masks_every_token_counts(tmp_path):
    assert TokenFile(write(tmp_path / "a.bin", range(9))).read_mask(3, 4).tolist() == [True] * 4


def test_version_1_has_no_vocabulary(tmp_path):
    path = write(tmp_path / "a.bin", [1, 2])
    patch(path, 8, "<i", 1)
    assert TokenFile(path).vocab_size == 0
    write(tmp_path / "b.bin", [1, 2], vocab_size=50)
    assert len(open_token_files(tmp_path / "*.bin", vocab_size=50)) == 2


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "message"),
    [
        (0, "<i", 20240520, "not a token file"),
        (8, "<i", 3, "version 3"),
        (12, "<i", 2, "2 bytes per token"),
        (16, "<i", 11, "is truncated"),
        (16, "<i", 9, "is too long"),
        (16, "<i", -1, "damaged header"),
        (20, "<i", -5, "damaged header"),
        (24, "<i", 1, "is truncated: 1064 bytes, but its header says 10 tokens with masks"),
    ],
)
def test_damaged_header(tmp_path, offset, fmt, value, message):
    path = write(tmp_path / "a.bin", range(10))
    patch(path, offset, fmt, value)
    with pytest.raises(DataError, match=message) as error:
        TokenFile(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [0, 5, 8, 1023, 1024, 1063])
def test_truncated_file(tmp_path, length):
    path = write(tmp_path / "a.bin", range(10))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match="not a token file" if length < 8 else "is truncated"):
        TokenFile(path)


def test_file_that_shrinks_later(tmp_path):
    path = write(tmp_path / "a.bin", range(10))
    file = TokenFile(path)
    path.write_bytes(path.read_bytes()[:1040])
    with pytest.raises(DataError, match="became shorter"):
        file.read_tokens(2, 8)


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match="no token file matches"):
        open_token_files(tmp_path / "*.bin")
    with pytest.raises(DataError, match="no token file matches"):
        open_token_files(str(tmp_path))  # a folder is no file
    with pytest.raises(DataError, match="cannot read token file"):
        TokenFile(tmp_path / "none.bin")


def test_vocabularies_must_agree_and_fit(tmp_path):
    write(tmp_path / "a.bin", [1], vocab_size=50)
    write(tmp_path / "b.bin", [1], vocab_size=60)
    with pytest.raises(DataError, match="one tokenizer"):
        open_token_files(tmp_path / "*.bin")
    open_token_files(tmp_path / "a.bin", vocab_size=50)
    with pytest.raises(DataError, match="the model has only 49"):
        open_token_files(tmp_path / "a.bin", vocab_size=49)


def test_patterns(tmp_path, monkeypatch):
    for name in ["b.bin", "a.bin", "c1.bin", "c2.bin", "B.bin", "[x].bin", "{y.bin"]:
        (tmp_path / name).touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "d.bin").touch()
    monkeypatch.setenv("HOME", str(tmp_path))

    def names(pattern):
        return [path.relative_to(tmp_path).as_posix() for path in expand_pattern(pattern)]

    everything = ["B.bin", "[x].bin", "a.bin", "b.bin", "c1.bin", "c2.bin", "{y.bin"]
    assert names(tmp_path / "*.bin") == everything
    assert names("~/{b,a,c{1,2}}.bin") == ["a.bin", "b.bin", "c1.bin", "c2.bin"]
    assert names("~/{a,[a-b]}.bin") == ["a.bin", "b.bin"]  # once each
    assert names("~/[x].bin") == ["[x].bin"]  # exists: literal
    assert names("~/c?.bin") == ["c1.bin", "c2.bin"]
    assert names("~/**/d.bin") == ["deep/er/d.bin"]
    assert names("~/{y.*") == ["{y.bin"]  # an unpaired brace stands for itself
    assert names("~/{a,c1}{.bin,}") == ["a.bin", "c1.bin"]
    assert names("~/none*") == names("~nosuchuser/a.bin") == []


def test_several_patterns_are_one_sorted_set(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.bin", [1])
    files = open_token_files([tmp_path / "c.bin", tmp_path / "[ab].bin", str(tmp_path / "a.bin")])
    assert [file.path.stem for file in files] == ["a", "b", "c"]


def test_appears_only_when_complete(tmp_path):
    path = tmp_path / "a.bin"
    with TokenWriter(path, 10) as writer:
        writer.write([1, 2, 3])
        assert not path.exists()
        assert partial_path(path).exists()
    assert path.exists()
    assert not partial_path(path).exists()


def test_discarded_on_error(tmp_path):
    with pytest.raises(KeyError), TokenWriter(tmp_path / "a.bin", 10) as writer:
        writer.write([1])
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_continue_a_partial_file(tmp_path):
    whole = write(tmp_path / "whole.bin", range(50))
    writer = TokenWriter(tmp_path / "a.bin", 100)
    writer.write(np.arange(30))
    writer.sync()
    writer.write(np.full(7, 99))  # after the last sync: dropped
    writer.suspend()
    with TokenWriter(tmp_path / "a.bin", 100, keep_tokens=30) as writer:
        writer.write(np.arange(30, 50))
    assert (tmp_path / "a.bin").read_bytes() == whole.read_bytes()
    partial_path(tmp_path / "b.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="is missing or too short"):
        TokenWriter(tmp_path / "b.bin", 100, keep_tokens=5)


def test_bad_writes(tmp_path, monkeypatch):
    with TokenWriter(tmp_path / "a.bin", 10) as writer:
        for ids in ([10], [-1]):
            with pytest.raises(ValueError, match=r"0\.\.9"):
                writer.write(ids)
        with pytest.raises(ValueError, match="mask"):
            writer.write([1], np.array([True]))
        monkeypatch.setattr("llmq.data.tokens.MAX_TOKENS", 3)
        writer.write([1, 2, 3])
        with pytest.raises(DataError, match="would exceed 3 tokens"):
            writer.write([4])
    with (
        TokenWriter(tmp_path / "b.bin", 10, with_masks=True) as writer,
        pytest.raises(ValueError, match="mask"),
    ):
        writer.write([1, 2], np.array([True]))
    with pytest.raises(LlmqError, match="No such file or directory"):
        TokenWriter(tmp_path / "none" / "a.bin", 10)


def test_full_disk(tmp_path, monkeypatch):
    def no_space(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = TokenWriter(tmp_path / "a.bin", 10)
    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(LlmqError, match="disk is full"):
        writer.close()
    assert not (tmp_path / "a.bin").exists()
