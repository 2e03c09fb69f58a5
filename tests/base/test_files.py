"""Atomic replacement of files and directories, and what remains when the disk is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmq.base import files
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import (
    check_writable,
    make_directory,
    prepare_report,
    publish_directory,
    replacing,
    staged_directory,
    temporary_path,
    write_file,
    write_shared,
)
from llmq.base.locks import LOCK, locked

REPLACES = ("config.json", "old-*")


def listing(directory):
    return sorted(path.name for path in directory.iterdir())


def fail(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


def test_write_shared_leaves_no_temporary_files(tmp_path):
    path = tmp_path / "folder" / "file"
    write_shared(path, b"one")
    write_shared(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # others may read it
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError):
        write_shared(tmp_path / "directory", b"three")
    assert not list(tmp_path.glob(".*"))


def test_write_file_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_file(path, "one")
    write_file(path, "zwei …")
    assert path.read_text("utf-8") == "zwei …"
    assert listing(tmp_path) == ["a.json"]


def test_contents_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    write_file(tmp_path / "a", "text")
    assert calls == [str(tmp_path / ".a.llmq-tmp"), "rename", str(tmp_path)]


def test_a_block_that_raises_changes_nothing(tmp_path):
    path = tmp_path / "a"
    write_file(path, "old")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["a"]


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_file(path, "old")
    monkeypatch.setattr(os, "fsync", fail(errno.ENOSPC))
    with pytest.raises(LlmqError, match=rf"^the disk is full, writing '{path}': .*$") as caught:
        write_file(path, "new")
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["a"]


@pytest.mark.parametrize("stale", ["file", "link"])
def test_what_a_killed_process_left_does_not_matter(tmp_path, stale):
    """Unfinished files of a killed process are replaced, and a link there is not followed."""
    path, other = tmp_path / "a", tmp_path / "other"
    other.write_text("of somebody")
    left = temporary_path(path)
    left.write_text("half") if stale == "file" else left.symlink_to(other)
    write_file(path, "new")
    assert path.read_text() == "new"
    assert other.read_text() == "of somebody"
    assert listing(tmp_path) == ["a", "other"]


def test_files_of_others_with_likely_names_stay(tmp_path):
    """Files of others that are called as temporary files would be stay as they are."""
    names = ["a.tmp", "a.old", "a.lock", "out.tmp", "out.old", "out.lock", "out/.tmp"]
    (tmp_path / "out").mkdir()
    for name in names:
        (tmp_path / name).mkdir()
    write_file(tmp_path / "a", "text")
    with staged_directory(tmp_path / "out", REPLACES) as staging:
        (staging / "config.json").touch()
    assert listing(tmp_path) == sorted(["a", *(n for n in names if "/" not in n), "out"])
    assert listing(tmp_path / "out") == [".tmp", "config.json"]


def test_what_an_interrupted_move_leaves_has_an_owner(tmp_path, monkeypatch):
    """Any of the names that were not synced may be left after a loss of power."""
    (tmp_path / "out").mkdir()
    moved, real = [], os.replace
    monkeypatch.setattr(files, "sync_directory", lambda path: moved.append(f"sync {path.name}"))

    def replace(source, target):
        moved.append(Path(target).name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with staged_directory(tmp_path / "out", REPLACES, "owner.json") as staging:
        for name in ("a", "config.json", "z", "owner.json"):
            (staging / name).touch()
    sync = "sync out"
    assert moved[1:] == [sync, "owner.json", sync, "a", "z", sync, "config.json", sync]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_stranger_in_the_place_of_unfinished_files_stays(tmp_path, kind):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    place = temporary_path(tmp_path / "out")
    place.symlink_to(tmp_path / "theirs") if kind == "link" else place.write_text("x")
    with (
        pytest.raises(LlmqError, match=r"cannot write .*: File exists"),
        staged_directory(tmp_path / "out", REPLACES),
    ):
        pass
    assert os.path.lexists(place)
    assert listing(tmp_path / "theirs") == ["file"]


def test_a_file_size_limit_is_reported(tmp_path):
    """A real refusal of the kernel, in another process because the limit cannot be raised again."""
    code = """
import resource, sys
from pathlib import Path
from llmq.base.errors import LlmqError
from llmq.base.files import write_file
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_file(Path(sys.argv[1]), "x" * 2000)
except LlmqError as error:
    print(error)
"""
    path = tmp_path / "a"
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"cannot write '{path}': File too large\n"
    assert listing(tmp_path) == []


def test_publish_directory_replaces(tmp_path):
    for text in ("one", "two"):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / text).touch()
        publish_directory(tmp_path / "new", tmp_path / "a")
        assert listing(tmp_path / "a") == [text]
        assert listing(tmp_path) == ["a"]


def test_publish_directory_that_fails_restores_the_old_one(tmp_path, monkeypatch):
    for name in ("a", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}").touch()
    rename = os.rename
    monkeypatch.setattr(
        os, "rename", lambda s, t: fail(errno.EIO)() if s == tmp_path / "new" else rename(s, t)
    )
    with pytest.raises(OSError):
        publish_directory(tmp_path / "new", tmp_path / "a")
    assert listing(tmp_path / "a") == ["of_a"]
    assert listing(tmp_path) == ["a", "new"]


def test_a_new_staged_directory_appears_at_once(tmp_path):
    path = tmp_path / "x" / "out"
    with staged_directory(path, REPLACES) as staging:
        (staging / "config.json").write_text("new")
        assert not path.exists()
    assert listing(path) == ["config.json"]
    assert listing(path.parent) == ["out"]


def existing(tmp_path):
    path = tmp_path / "out"
    (path / "notes").mkdir(parents=True)
    for name in ("config.json", "old-1", "old-2"):
        (path / name).write_text("old")
    return path


def test_an_existing_directory_keeps_what_is_not_replaced(tmp_path):
    path = existing(tmp_path)
    with staged_directory(path, REPLACES) as staging:
        for name in ("config.json", "old-2", "new"):
            (staging / name).write_text("new")
        assert (path / "config.json").read_text() == "old"
    assert listing(path) == ["config.json", "new", "notes", "old-2"]
    assert all((path / n).read_text() == "new" for n in ("config.json", "old-2", "new"))


def test_a_stop_while_files_move_leaves_no_valid_directory(tmp_path, monkeypatch):
    """A mixture of old and new must not pass for a model: the file that makes it valid is gone."""
    path = existing(tmp_path)
    monkeypatch.setattr(os, "replace", fail(errno.EIO))
    with (
        pytest.raises(LlmqError, match="Input/output error"),
        staged_directory(path, REPLACES) as staging,
    ):
        (staging / "config.json").write_text("new")
    assert not (path / "config.json").exists()
    assert listing(path / ".llmq-tmp") == ["config.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("old", [False, True])
def test_a_staged_directory_on_a_full_disk(tmp_path, monkeypatch, number, old):
    path = existing(tmp_path) if old else tmp_path / "out"
    before = listing(path) if old else None
    monkeypatch.setattr(files.os, "fsync", fail(number))
    with (
        pytest.raises(LlmqError, match="the disk is full"),
        staged_directory(path, REPLACES) as staging,
    ):
        (staging / "config.json").write_text("new")
    if old:
        assert listing(path) == before
        assert (path / "config.json").read_text() == "old"
    else:
        assert listing(tmp_path) == []


def folders_on_the_disk(monkeypatch):
    """Two lists that grow: the folders that were made, and those whose names are on the disk."""
    made, known = [], []
    mkdir, fsync = os.mkdir, os.fsync

    def make(path, *args):
        mkdir(path, *args)
        made.append(os.path.realpath(path))

    def sync(descriptor):
        fsync(descriptor)
        synced = os.path.realpath(f"/proc/self/fd/{descriptor}")
        known.extend(path for path in made if os.path.dirname(path) == synced)

    monkeypatch.setattr(os, "mkdir", make)
    monkeypatch.setattr(os, "fsync", sync)
    return made, known


def test_the_names_of_new_folders_are_on_the_disk(tmp_path, monkeypatch):
    made, known = folders_on_the_disk(monkeypatch)
    with locked(tmp_path / "a" / "b" / LOCK, "--x", tmp_path):
        assert set(made) == set(known) == {str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    made.clear()
    with staged_directory(tmp_path / "c" / "d" / "e", REPLACES) as staging:
        (staging / "config.json").touch()
    assert {str(tmp_path / "c"), str(tmp_path / "c" / "d")} <= set(known)
    assert made[:2] == [str(tmp_path / "c"), str(tmp_path / "c" / "d")]
    make_directory(tmp_path / "f" / "g")
    assert {str(tmp_path / "f"), str(tmp_path / "f" / "g")} <= set(known)


def test_leftovers_of_a_killed_run_are_not_published(tmp_path):
    (tmp_path / ".out.llmq-tmp").mkdir()
    (tmp_path / ".out.llmq-tmp" / "stale").touch()
    with staged_directory(tmp_path / "out", REPLACES) as staging:
        (staging / "config.json").touch()
    assert listing(tmp_path / "out") == ["config.json"]


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    check_writable("--out", tmp_path / "new" / "er")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    message = f"--out: cannot write into '{tmp_path / 'new'}': '{tmp_path}' is not writable, choose"
    with pytest.raises(LlmqError, match=message):
        check_writable("--out", tmp_path / "new")
    assert listing(tmp_path) == []


def test_reports_that_could_not_be_written_in_the_end(tmp_path):
    out = tmp_path / "deep" / "v1.2"
    paths = prepare_report("--out", out, ".json", ".md")
    assert [path.name for path in paths] == ["v1.2.json", "v1.2.md"]
    assert listing(tmp_path / "deep") == []
    paths[0].touch()
    prepare_report("--out", out, ".json")
    for folder in (Path("."), Path(".."), tmp_path / ".."):
        with pytest.raises(ConfigError, match=r"--out: '.*' is a folder: give the name"):
            prepare_report("--out", folder, ".json")
    with pytest.raises(LlmqError, match="File name too long"):
        prepare_report("--out", tmp_path / ("x" * 245), ".json")
    paths[1].mkdir()
    with pytest.raises(ConfigError, match=r"--out: '.*v1\.2\.md' is no file: choose another name"):
        prepare_report("--out", out, ".json", ".md")


def test_a_file_system_that_takes_no_files():
    """The super-user may think that it takes them."""
    with pytest.raises(LlmqError, match="--out: cannot write into '/proc/x': '/proc' "):
        check_writable("--out", Path("/proc/x"))
