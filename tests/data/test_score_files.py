"""Score files: a death at any moment costs no scores, and complete ones have checksums."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmq.base.errors import ConfigError, DataError
from llmq.data.checksums import checksums_path
from llmq.data.document_file import documents_path, has_pairs, partial_path
from llmq.data.scores import COMPLETE, HEADER_BYTES, Scored, ScoreFile, ScoreWriter, scores_path
from llmq.data.tokens import TokenFile, TokenWriter
from tools.faults.calls import Calls, Fault, Shared, install

TOKENS = 100


@pytest.fixture
def file(tmp_path):
    """A token file without documents."""
    (tmp_path / "mine").mkdir()
    with TokenWriter(tmp_path / "mine/train.bin", 9) as writer:
        writer.write(np.arange(TOKENS) % 9)
    return TokenFile(tmp_path / "mine/train.bin")


def write_scores(folder: Path, file: TokenFile, **how: bool) -> Path:
    """Score the file in two halves, from the half that is missing on."""
    path = scores_path(folder, file.path)
    writer = ScoreWriter(path, Scored.of(file, {"name": "m"}, seq_len=8), **how)
    if writer.done != COMPLETE:
        for half in (0, 1):
            if writer.done <= half:
                writer.write(half * TOKENS // 2, np.linspace(-1, half, TOKENS // 2))
                if not half:
                    writer.save(1)
        writer.close()
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def dies(folder: Path, file: TokenFile, at: int, how: str) -> bool:
    """Whether a process that scores dies at this change of a file below the folder."""
    pid = os.fork()
    if not pid:
        try:
            install(Calls(folder, Shared(), Fault(at, how)))
            write_scores(folder, file)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


@pytest.mark.parametrize("how", ["before", "torn", "after"])
def test_a_death_at_any_moment_costs_no_scores(tmp_path, file, how):
    want, at = tmp_path / "want", 0
    want.mkdir()
    write_scores(want, file)
    while True:
        folder = tmp_path / f"{at}"
        folder.mkdir()
        dead = dies(folder, file, at, how)
        write_scores(folder, file)
        assert contents(folder) == contents(want), f"{how} call {at}"
        shutil.rmtree(folder)
        if not dead:
            break
        at += 1
    assert at >= 10


@pytest.mark.parametrize("content", [b"", b"\0" * 9000, b"BIN.SCR\n" + b"\0" * 4088])
def test_a_partial_file_without_a_header_is_begun_anew(tmp_path, file, content):
    path = scores_path(tmp_path, file.path)
    partial_path(path).write_bytes(content)
    write_scores(tmp_path, file)
    assert len(ScoreFile(path).read(0, TOKENS)) == TOKENS


def test_a_partial_file_without_its_end_is_begun_anew(tmp_path, file):
    """A full disk cuts a file whose header says that scores are done."""
    path = write_scores(tmp_path, file)
    want = path.read_bytes()
    path.rename(partial_path(path))
    checksums_path(path).unlink()
    os.truncate(partial_path(path), HEADER_BYTES + 8)
    write_scores(tmp_path, file)
    assert path.read_bytes() == want


def test_scores_that_lost_their_end_are_no_complete_ones(tmp_path, file):
    path = write_scores(tmp_path, file)
    os.truncate(path, HEADER_BYTES + 8)
    with pytest.raises(DataError, match=r"is truncated: .*--overwrite"):
        write_scores(tmp_path, file)
    write_scores(tmp_path, file, overwrite=True)
    assert len(ScoreFile(path).read(0, TOKENS)) == TOKENS


def test_pipes_beside_token_files_are_refused_and_not_waited_for(tmp_path, file):
    path = scores_path(tmp_path, file.path)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"scores' is a pipe or a device"):
        ScoreFile(path)
    with pytest.raises(ConfigError, match=r"scores' is a pipe or a device"):
        write_scores(tmp_path, file)
    os.mkfifo(documents_path(file.path))
    with pytest.raises(ConfigError, match=r"docs' is a pipe or a device"):
        has_pairs(file.path)
