"""Checkpoints: any cut into shards is read back, any damage is found, nothing is half written."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch

from llmq.base.dtypes import BF16, F32
from llmq.base.errors import LlmqError
from llmq.base.run_id import RunId
from llmq.checkpoint import checkpoint as checkpoint_module
from llmq.checkpoint import folder
from llmq.checkpoint.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    FileEntry,
    required_groups,
    slab_ranges,
)
from llmq.checkpoint.exports import export
from llmq.checkpoint.folder import discard, move
from llmq.checkpoint.manifest import MANIFEST, Manifest, digest_of
from llmq.checkpoint.states import Keep, checkpoint_at, find_checkpoint, kept_checkpoints, outdated
from llmq.checkpoint.store import delete_old, list_checkpoints
from llmq.options.option_types import NEWEST
from llmq.options.presets import preset
from llmq.state.params import weight_table
from llmq.state.rules.adamw import AdamW
from llmq.text.tokenizer import ByteTokenizer
from llmq.text.tokenizer_id import identity_of

MODEL = dataclasses.replace(
    preset("tiny"),
    **{"vocab_size": 70, "hidden_size": 24, "intermediate_size": 40, "num_layers": 2},
    **{"head_dim": 12, "tied_embeddings": False, "other_eos_token_ids": (7, 8)},
)  # embedding and head are padded from 70 to 128 rows
TABLE = weight_table(MODEL)
PARAMS = [param for slab in TABLE for param in slab.params]
GROUPS = required_groups(AdamW)
DTYPES = {"weights": BF16, "adam.m": BF16, "adam.v": F32}
RUN = RunId.new("llmq")
MANIFEST_VALUES = Manifest(
    model=MODEL,
    loader={"seed": 2**63, "epoch": 1, "files": "abc"},
    state={"rng": [1, 2], "ring": [0.1, 1e-300, float("inf")], "ä": None},
    options={"lr": 1e-5},
    tokenizer=None,
    run=RUN,
)


def slab_values(group, slab):
    """A slab as a rank would hold all of it; NaN in the gaps, rubbish in the padding."""
    rng = np.random.default_rng([GROUPS.index(group), slab.params[0].index])
    values = np.full(slab.size, np.nan, np.float32)
    for param in slab.params:
        values[param.offset : param.offset + param.size] = rng.standard_normal(param.size)
    return values.astype(DTYPES[group].numpy)


VALUES = {group: {slab.name: slab_values(group, slab) for slab in TABLE} for group in GROUPS}


def expected(group, param):
    """The values that must be read back, zero in the padding."""
    slab = next(slab for slab in TABLE if param in slab.params)
    values = VALUES[group][slab.name][param.offset : param.offset + param.size].copy()
    values.reshape(param.shape)[param.rows :] = 0
    return values


def even_cuts(world):
    return {slab.name: [slab.size * r // world for r in range(world + 1)] for slab in TABLE}


def random_cuts(world, seed):
    rng = np.random.default_rng(seed)
    return {
        slab.name: [0, *sorted(rng.integers(0, slab.size + 1, world - 1).tolist()), slab.size]
        for slab in TABLE
    }


def write_rank(directory, step, rank, world, cuts):
    """One rank's part of a checkpoint, from the shards of the slabs that it holds."""
    writer = CheckpointWriter(directory, step, rank, world)
    shards = {slab.name: tuple(cuts[slab.name][rank : rank + 2]) for slab in TABLE}
    home = {param.name: slab.name for slab in TABLE for param in slab.params}
    ranges = [r for slab in TABLE for r in slab_ranges("weights", slab, *shards[slab.name])]
    entries = []
    for group in GROUPS:

        def read(param, start, stop, group=group):
            first, last = (param.offset + start, param.offset + stop)
            begin, end = shards[home[param.name]]
            assert begin <= first < last <= end  # a rank is asked only for what it holds
            return VALUES[group][home[param.name]][first:last]

        entries.append(writer.write(group, DTYPES[group], ranges, read))
    return writer, entries


def save(directory, step=10, world=1, cuts=None, manifest=MANIFEST_VALUES):
    cuts = cuts or even_cuts(world)
    with ThreadPoolExecutor(world) as pool:
        ranks = list(
            pool.map(lambda rank: write_rank(directory, step, rank, world, cuts), range(world))
        )
    return ranks[0][0].commit(manifest, [entry for _, entries in ranks for entry in entries])


def assert_complete(path):
    with CheckpointReader(path) as reader:
        reader.check(TABLE)
        for group in GROUPS:
            for param in PARAMS:
                values = reader.read(group, param)
                np.testing.assert_array_equal(values, expected(group, param), strict=True)


def listing(directory):
    return sorted(path.name for path in directory.iterdir())


# ------------------------------------------------------------------------------------------------
# Writing and reading


CUTS = {f"random {seed}": random_cuts(4, seed) for seed in range(5)} | {
    "even": even_cuts(4),
    "in the padding": {s.name: [0, s.size - 5, s.size - 3, s.size, s.size] for s in TABLE},
    "nothing but one": {s.name: [0, s.size, s.size, s.size, s.size] for s in TABLE},
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_four_ranks_are_read_by_one_and_by_three(tmp_path, cuts):
    """Ranks may have nothing but padding of a slab, or nothing at all."""
    path = save(tmp_path, world=4, cuts=cuts)
    assert_complete(path)
    last = safetensors.torch.load_file(path / "adam.v.shard_003_of_004.safetensors")
    held = {s.name: cuts[s.name][3] < min(cuts[s.name][4], 70 * 24) for s in TABLE}
    assert ("model.embed_tokens.weight" in last) == held["embed"]
    with CheckpointReader(path) as reader:
        readers = random_cuts(3, 77)
        for group in GROUPS:
            for slab in TABLE:
                whole = np.full(slab.size, np.nan, DTYPES[group].numpy)
                for begin, end in zip(readers[slab.name], readers[slab.name][1:], strict=False):
                    shard = whole[begin:end]
                    for param, start, stop in slab_ranges(group, slab, begin, end):
                        at = param.offset + start - begin
                        shard[at : at + stop - start] = reader.read(group, param, start, stop)
                for param in slab.params:
                    values = whole[param.offset : param.offset + param.size]
                    np.testing.assert_array_equal(values, expected(group, param), strict=True)


def test_leftovers_of_a_killed_save_do_not_matter(tmp_path):
    write_rank(tmp_path, 10, 1, 2, random_cuts(2, 0))  # a rank that had finished, no commit
    (tmp_path / "step_00000010.tmp" / ".weights.shard_000_of_001.safetensors.llmq-tmp").touch()
    assert list_checkpoints(tmp_path) == {}
    path = save(tmp_path)
    assert len(listing(path)) == 4
    assert listing(tmp_path) == ["step_00000010"]
    assert_complete(path)


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Ranges are written to the file one after the other, while these are read."""
    writer = CheckpointWriter(tmp_path, 1)
    name = "weights.shard_000_of_001.safetensors"
    file = tmp_path / "step_00000001.tmp" / f".{name}.llmq-tmp"
    buffer = np.zeros(max(param.size for param in PARAMS), np.float32)  # the same for all
    sizes = []

    def read(param, start, stop):
        sizes.append(file.stat().st_size)
        buffer[:] = param.index
        return buffer[: stop - start]

    writer.write("weights", F32, [(p, 0, p.size) for p in PARAMS], read)
    assert len(set(sizes)) > 3
    tensors = safetensors.torch.load_file(file.with_name(name))
    assert all((tensors[param.name] == param.index).all() for param in PARAMS)


# ------------------------------------------------------------------------------------------------
# Damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The files of a complete checkpoint of two ranks, by name."""
    path = save(tmp_path_factory.mktemp("saved"), world=2, cuts=random_cuts(2, 5))
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def damaged(saved, tmp_path):
    """damaged(name, change): the checkpoint with change(bytes) in one file; None removes it."""

    def get(name, change):
        path = tmp_path / "step_00000010"
        path.mkdir()
        for file, content in saved.items():
            content = change(bytearray(content)) if file == name else content
            if content is not None:
                (path / file).write_bytes(content)
        return path

    return get


def flip(offset):
    def change(content):
        content[offset] ^= 4
        return content

    return change


WEIGHTS, MOMENT = "weights.shard_001_of_002.safetensors", "adam.v.shard_000_of_002.safetensors"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (WEIGHTS, flip(-1), "is damaged: wrong checksum"),
        (MOMENT, flip(5000), "is damaged: wrong checksum"),
        (MOMENT, flip(20), "is damaged: wrong checksum"),  # in the header
        (WEIGHTS, flip(0), "is damaged: wrong checksum"),  # in the header's length
        (WEIGHTS, lambda c: c[:-1], "has .* bytes instead of"),
        (WEIGHTS, lambda c: c + b"x", "has .* bytes instead of"),
        (WEIGHTS, lambda c: b"", "has 0 bytes instead of"),
        (MOMENT, lambda c: None, "is missing"),
        (MANIFEST, lambda c: c.replace(b"1e-05", b"2e-05"), "is damaged: wrong checksum"),
        (MANIFEST, lambda c: c.replace(b'"step": 10', b'"step": 11'), "damaged: wrong checksum"),
        (MANIFEST, lambda c: c.replace(b'"sha256"', b'"sha257"'), "damaged: wrong checksum"),
        (MANIFEST, lambda c: c[:-5], "is damaged"),
        (MANIFEST, lambda c: b"\xff\xfe", "is damaged"),
        (MANIFEST, lambda c: b"[]", "has version None; only 1"),
        (MANIFEST, lambda c: b'{"version": 20260120}', "has version 20260120; only 1"),
        (MANIFEST, lambda c: None, r"is not a complete checkpoint: it has no checkpoint\.json"),
    ],
)
def test_damage_is_found_before_anything_is_read(damaged, name, change, message):
    path = damaged(name, change)
    with pytest.raises(LlmqError, match=message) as caught:
        CheckpointReader(path)
    assert str(path / name) in str(caught.value) or str(path) in str(caught.value)
    if name != MANIFEST:
        assert f"'{path / name}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_flipped_byte_of_the_manifest_is_found_or_harmless(damaged, saved):
    path = damaged(MANIFEST, lambda content: content)
    rng = np.random.default_rng(0)
    found = 0
    for offset in rng.integers(0, len(saved[MANIFEST]), 200).tolist():
        (path / MANIFEST).write_bytes(flip(offset)(bytearray(saved[MANIFEST])))
        try:
            CheckpointReader(path).close()
        except LlmqError:
            found += 1
        else:  # only white space between the values may change
            assert saved[MANIFEST][offset : offset + 1].isspace()
    assert found > 100


def test_an_unchanged_copy_is_complete(damaged):
    assert_complete(damaged(None, None))


def table_of(**changes):
    return weight_table(dataclasses.replace(MODEL, **changes))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (table_of(num_layers=3), r"another model: its weights has no model\.layers\.2\."),
        (table_of(num_layers=1), r"another model: its weights holds model\.layers\.1\.input_layer"),
        (table_of(intermediate_size=48), r"mlp\.up\.weight has 1920 elements, this model's 2304"),
        (table_of(tied_embeddings=True), r"its weights holds lm_head\.weight, which"),
    ],
)
def test_a_checkpoint_of_another_model(tmp_path, table, message):
    with (
        CheckpointReader(save(tmp_path, world=2)) as reader,
        pytest.raises(LlmqError, match=message),
    ):
        reader.check(table)


def test_elements_that_nobody_wrote_are_missed(tmp_path):
    """Files and checksums are fine, but the ranks' ranges leave a hole."""
    cuts = even_cuts(2)
    up = next(param for param in PARAMS if param.key == "up")

    def write(rank):
        writer = CheckpointWriter(tmp_path, 10, rank, 2)
        entries = []
        for group in GROUPS:
            shards = [(s, *cuts[s.name][rank : rank + 2]) for s in TABLE]
            ranges = [r for shard in shards for r in slab_ranges(group, *shard)]
            ranges = [(p, a, b) for p, a, b in ranges if p != up or group != "adam.m"]
            ranges += [(up, 0, 100) if rank else (up, 101, up.size)] * (group == "adam.m")
            zeros = lambda param, a, b: np.zeros(b - a, np.float32)  # noqa: E731
            entries.append(writer.write(group, F32, ranges, zeros))
        return writer, entries

    (writer, first), (_, second) = write(0), write(1)
    with CheckpointReader(writer.commit(MANIFEST_VALUES, first + second)) as reader:
        message = rf"adam\.m lacks {up.name} from element 100 on"
        with pytest.raises(LlmqError, match=message):
            reader.check(TABLE)
        with pytest.raises(LlmqError, match=message):
            reader.read("adam.m", up)
        assert reader.read("adam.m", up, 101, 200).shape == (99,)
        assert reader.read("weights", up).shape == (up.size,)


# ------------------------------------------------------------------------------------------------
# Full disk


@pytest.mark.parametrize("call", range(12))
def test_a_disk_that_is_full_at_any_moment(tmp_path, monkeypatch, call):
    """The n-th flush to the disk fails, for every n; the older checkpoint of this step stays."""
    save(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step_00000010").iterdir()}
    calls = []

    def fsync(_):
        calls.append(1)
        if len(calls) == call + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    other = dataclasses.replace(MANIFEST_VALUES, state={"new": True})
    published = 2 * (len(GROUPS) + 1) + 1  # file and directory each, the step directory; then: done
    if call > published:
        save(tmp_path, manifest=other)
        assert len(calls) == published + 1
    else:
        with pytest.raises(LlmqError, match=r"^the disk is full, writing '"):
            save(tmp_path, manifest=other)
        discard(tmp_path, 10)
    path = tmp_path / "step_00000010"
    if call < published:
        assert listing(tmp_path) == ["step_00000010"]
        assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert_complete(path)


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_rank_that_fails_leaves(tmp_path, world):
    """The others, which may be writing, must not fail with another error, and first."""

    def read(param, start, stop):
        raise KeyboardInterrupt

    writer = CheckpointWriter(tmp_path, 10, 0, world)
    with pytest.raises(KeyboardInterrupt):
        writer.write("weights", F32, [(PARAMS[0], 0, 5)], read)
    assert listing(tmp_path) == ["step_00000010.tmp"]
    if world > 1:
        write_rank(tmp_path, 10, 1, 2, even_cuts(2))
    writer.discard()
    assert listing(tmp_path) == []


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "ckpt").write_text("a file")
    with pytest.raises(LlmqError, match=r"cannot write '.*step_00000010\.tmp': Not a directory"):
        CheckpointWriter(tmp_path / "ckpt", 10)


# ------------------------------------------------------------------------------------------------
# Finding and deleting


def fake(directory, *names):
    """Directories that pass for complete checkpoints."""
    for name in names:
        (directory / name).mkdir(parents=True)
        file = "weights.shard_000_of_001.safetensors"
        entry = FileEntry(file, "weights", 0, 0, hashlib.sha256().hexdigest())
        parts = {"data-loader": {}, "model": {}, "options": {}, "distributed": {"world": 1}}
        number = re.search(r"step_(\d+)", name)
        step = int(number[1]) if number else 0
        parts |= {"version": 1, "files": [entry._asdict()]}
        parts["run"] = {"step": step, "state": {}, **RUN.record()}
        write_manifest(directory / name, parts)
        (directory / name / entry.name).touch()


def write_manifest(path, document):
    (path / MANIFEST).write_text(json.dumps(document | {"sha256": digest_of(document)}))


def steps(*numbers):
    return [f"step_{number:08d}" for number in numbers]


def test_find_checkpoint(tmp_path, monkeypatch):
    fake(tmp_path / "a", *steps(5, 20, 100), "step_00000200.tmp", "step_final", "old_step_300")
    (tmp_path / "a" / "step_00000300").mkdir()  # incomplete
    (tmp_path / "a" / "step_00000400").write_text("a file")
    fake(tmp_path / "b", *steps(7), "step_123456789", "step_00000008.old")
    a, b = tmp_path / "a", tmp_path / "b"
    assert list_checkpoints(a) == {n: a / f"step_{n:08d}" for n in (5, 20, 100)}
    assert find_checkpoint(a) == a / "step_00000100"
    assert find_checkpoint(a, "20") == a / "step_00000020"
    assert find_checkpoint(a, "0") is None
    assert find_checkpoint(a, "300") is None
    assert find_checkpoint(a, str(b)) == b / "step_123456789"  # more digits: by number, not name
    assert find_checkpoint(a, f"{b}/step_00000007/") == b / "step_00000007"
    assert find_checkpoint(a, f"{a}/step_00000300") is None
    assert find_checkpoint(a, f"{b}/step_00000009") is None
    assert find_checkpoint(a, str(tmp_path)) is None
    assert find_checkpoint(tmp_path / "none") is None
    monkeypatch.chdir(b / "step_00000007")
    assert find_checkpoint(a, ".") == b / "step_00000007"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoint(a, "~/b/step_00000007") == b / "step_00000007"
    assert checkpoint_at(Path("~/b/step_00000007")) == b / "step_00000007"


def test_a_checkpoint_named_like_another_step(tmp_path):
    """The step is the recorded one; a name that contradicts it would mix up their order."""
    for step in (6, 7):
        save(tmp_path, step=step)
    renamed = tmp_path / "step_9"
    os.rename(tmp_path / "step_00000006", renamed)
    message = (
        f"'{renamed}' holds step 6, though its name says 9: rename it to step_00000006, or to a "
        "name that is no step"
    )
    for spec in (NEWEST, "9", "6", str(tmp_path), str(renamed)):
        with pytest.raises(LlmqError, match=f"^{re.escape(message)}$"):
            find_checkpoint(tmp_path, spec)
    assert find_checkpoint(tmp_path, str(tmp_path / "step_00000007")).name == "step_00000007"
    save(tmp_path, step=80)
    assert [path.name for path in clean_old(tmp_path, 1, -1, saved=80)] == ["step_00000007"]
    assert listing(tmp_path) == ["step_00000080", "step_9"]
    manifest = renamed / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"step": 6', '"step": "6"'))
    assert '"step": "6"' in manifest.read_text() and len(list_checkpoints(tmp_path)) == 2
    os.rename(renamed, tmp_path / "step_best")
    assert find_checkpoint(tmp_path).name == "step_00000080"


def test_a_stop_in_the_middle_of_replacing_leaves_a_checkpoint(tmp_path, monkeypatch):
    """Between the two renames the older one is called step_….llmq-old, and is found there."""
    path = save(tmp_path)
    rename = os.rename

    def stop(source, target):
        if Path(source).name.endswith(".tmp"):
            raise SystemExit  # as if the machine stopped: nothing is restored
        rename(source, target)

    monkeypatch.setattr(os, "rename", stop)
    monkeypatch.setattr(checkpoint_module, "publish_directory", crash_between_renames)
    with pytest.raises(SystemExit):
        save(tmp_path)
    assert not path.exists()
    found = find_checkpoint(tmp_path)
    assert found == tmp_path / "step_00000010.llmq-old" == find_checkpoint(tmp_path, "10")
    assert_complete(found)
    monkeypatch.undo()
    assert save(tmp_path) == path == find_checkpoint(tmp_path)
    assert listing(tmp_path) == ["step_00000010"]


def crash_between_renames(temporary, path):
    os.rename(path, path.with_name(path.name + ".llmq-old"))
    os.rename(temporary, path)


def clean_old(directory, keep_n, major, saved):
    """Delete what --ckpt-keep-n and --ckpt-major let go."""
    gone = outdated(kept_checkpoints(directory, RUN), Keep(keep_n, major), saved)
    return delete_old(directory, RUN, gone)


@pytest.mark.parametrize(
    ("keep_n", "major", "left"),
    [
        (-1, -1, [10, 20, 30, 40, 50]),
        (2, -1, [40, 50]),
        (2, 20, [20, 30, 40, 50]),  # 20 and 40 are majors
    ],
)
def test_clean_old(tmp_path, keep_n, major, left):
    fake(tmp_path, *steps(10, 20, 30, 40, 50))
    (tmp_path / "step_00000005").mkdir()  # incomplete: not a checkpoint, none of our business
    (tmp_path / "notes").touch()
    removed = clean_old(tmp_path, keep_n, major, saved=10_000)
    assert listing(tmp_path) == ["notes", *steps(5, *left)]
    assert [path.name for path in removed] == steps(*sorted({10, 20, 30, 40, 50} - set(left)))


@pytest.mark.parametrize("keep_n", [-1, 1])
def test_clean_old_removes_interrupted_saves(tmp_path, keep_n):
    fake(tmp_path, *steps(10), "step_00000020.tmp", "step_00000010.llmq-old")
    names = [".adam.m.shard_000_of_001.safetensors.llmq-tmp", ".checkpoint.json.llmq-tmp"]
    for name in names:
        (tmp_path / "step_00000020.tmp" / name).touch()
    gone = [tmp_path / "step_00000010.llmq-old", tmp_path / "step_00000020.tmp"]
    assert clean_old(tmp_path, keep_n, -1, saved=20) == gone
    assert listing(tmp_path) == steps(10)


def test_clean_old_leaves_what_is_not_of_a_save(tmp_path):
    """Files of any name, and links with their targets, stay."""
    fake(tmp_path / "theirs", "step_00000020", "step_00000030.tmp")
    fake(tmp_path / "a", *steps(40), "step_final.tmp", "step_00000050.tmp", "step_00000010.old")
    (tmp_path / "a" / "step_00000050.tmp" / "thesis.tex").touch()
    (tmp_path / "a" / "step_00000060.tmp").touch()
    for name in ("step_00000020", "step_00000030.tmp"):
        (tmp_path / "a" / name).symlink_to(tmp_path / "theirs" / name)
    before = listing(tmp_path / "a")
    theirs = listing(tmp_path / "theirs" / "step_00000020")
    assert clean_old(tmp_path / "a", 2, -1, saved=40) == []
    assert listing(tmp_path / "a") == before
    assert listing(tmp_path / "theirs" / "step_00000020") == theirs
    with pytest.raises(LlmqError, match=r"step_00000030\.tmp': it is a link$"):
        CheckpointWriter(tmp_path / "a", 30)
    (tmp_path / "a" / "step_00000070").mkdir()
    (tmp_path / "a" / "step_00000070" / "thesis.tex").touch()
    for step in (50, 70):
        with pytest.raises(LlmqError, match=r"it is no folder of a checkpoint's: move it away$"):
            CheckpointWriter(tmp_path / "a", step)
        discard(tmp_path / "a", step)
    assert (tmp_path / "a" / "step_00000050.tmp" / "thesis.tex").exists()
    assert listing(tmp_path / "a" / "step_00000070") == ["thesis.tex"]


@pytest.mark.parametrize("call", ["rename", "rmdir", "unlink"])
def test_clean_old_goes_on_where_it_cannot_delete(tmp_path, monkeypatch, capsys, call):
    fake(tmp_path, *steps(10, 20, 50))
    real = getattr(os, call)

    def busy(path, *args, **kwargs):
        if "step_00000010" in os.fspath(path) or "dir_fd" in kwargs:
            monkeypatch.setattr(os, call, real)  # once
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, busy)
    assert clean_old(tmp_path, 1, -1, saved=50) == [tmp_path / steps(20)[0]]
    warning = f"warning: cannot delete '{tmp_path / steps(10)[0]}' (Device or resource busy)"
    assert capsys.readouterr().err == f"{warning}: it stays\n"
    assert find_checkpoint(tmp_path).name == "step_00000050"
    assert list_checkpoints(tmp_path).keys() <= {10, 50}
    clean_old(tmp_path, 1, -1, saved=50)
    assert listing(tmp_path) == steps(50), "what was left is deleted the next time"


def test_a_directory_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    fake(tmp_path, *steps(10))
    denied = OSError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(os, "scandir", Mock(side_effect=denied))
    monkeypatch.setattr(os, "listdir", Mock(side_effect=denied))
    with pytest.raises(LlmqError, match=f"^cannot list '{tmp_path}': Permission denied$"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_that_cannot_be_looked_into_is_not_incomplete(tmp_path, monkeypatch):
    fake(tmp_path, *steps(10))
    real = os.stat

    def stat(path, *args, **kwargs):
        if str(path).endswith(MANIFEST):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(LlmqError, match=r"^cannot look into .*: Input/output err"):
        find_checkpoint(tmp_path)


def test_a_file_is_hashed_once_as_long_as_it_is_the_same(tmp_path, monkeypatch):
    path = save(tmp_path, world=2)
    hashed, real = [], hashlib.file_digest

    def digest(file, kind):
        hashed.append(Path(file.name).name)
        return real(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    assert find_checkpoint(tmp_path) == path
    CheckpointReader(path).close()
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert sorted(hashed) == files
    os.utime(path / files[0])
    CheckpointReader(path).close()
    assert hashed[len(files) :] == [files[0]]


# ------------------------------------------------------------------------------------------------
# Export


def test_an_export_brings_its_tokenizer(tmp_path):
    ByteTokenizer().save(tmp_path / "model")
    for source in ("bytes", str(tmp_path / "model")):
        made = identity_of(ByteTokenizer()).record()
        manifest = dataclasses.replace(MANIFEST_VALUES, tokenizer=source, tokenizer_id=made)
        path = save(tmp_path / "ckpt", manifest=manifest)
        assert "tokenizer.json" in export(path, tmp_path / "out")
        expected_bytes = (tmp_path / "model" / "tokenizer.json").read_bytes()
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == expected_bytes
    gone = dataclasses.replace(MANIFEST_VALUES, tokenizer=str(tmp_path / "gone"))
    path = save(tmp_path / "ckpt", manifest=gone)
    assert "tokenizer.json" not in export(path, tmp_path / "out2")


def test_nothing_to_export(tmp_path):
    (tmp_path / "step_00000010.tmp").mkdir()
    with pytest.raises(LlmqError, match=f"there is no complete checkpoint in '{tmp_path}'"):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_clean_old_keeps_what_was_just_saved(tmp_path):
    fake(tmp_path, *steps(20, 40, 60))  # 60 is of a run that was abandoned: it went on from 20
    clean_old(tmp_path, 1, -1, saved=40)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000040"]


@pytest.mark.parametrize("kind", ["checkpoint", "file", "with a folder", "no links"])
def test_what_is_moved_has_one_name_at_least(tmp_path, monkeypatch, kind):
    """On the disk, too: the new one is there before the old one goes, where there are links."""
    path, target = tmp_path / "ckpt/step_00000002", tmp_path / "aside/step_00000002"
    file = path if kind == "file" else path / "checkpoint.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    if kind == "with a folder":
        (path / "more").mkdir()
    target.parent.mkdir()
    if kind == "no links":
        monkeypatch.setattr(os, "link", failing_link)
    seen = []
    real = folder.sync_directory
    monkeypatch.setattr(
        folder, "sync_directory", lambda at: real(at) or seen.append((path.exists(), at.name))
    )
    move(path, target)
    linked = kind in ("checkpoint", "file")
    assert [each for each in seen if each[1] != target.name] == [(linked, "aside"), (False, "ckpt")]
    assert os.listdir(tmp_path / "ckpt") == [] and os.listdir(target.parent) == [target.name]
    assert (target / file.relative_to(path)).read_text() == "{}"


def failing_link(*_, **__):
    raise PermissionError(errno.EPERM, "Operation not permitted")
