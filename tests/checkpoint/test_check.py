"""`llmq check`: nothing that is damaged passes, and what is whole does."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from llmq.checkpoint.folder import _digest, problem_of
from llmq.commands.cli import _run
from llmq.runtime.world import World
from llmq.text.token_shards import gaps
from tests.runs import make_workplace, train
from tests.text_data import run, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what `tokenize` and `train` write."""
    folder = make_workplace(tmp_path_factory.mktemp("check"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_jsonl(folder / "a.jsonl", ["some text", "more of it"] * 100)
        run(folder / "a.jsonl", out=folder / "made", eval_fraction=0.1)
        assert train(steps=2, ckpt_interval=1, save_training_state=True) == 0
    return folder


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def check(capsys, *names):
    status = _run(["check", *map(str, names)])
    out, err = capsys.readouterr()
    return status, out, err


def test_what_is_whole(capsys):
    status, out, err = check(capsys, "made", "ckpt", "out", "data/*.bin", "model.none*")
    assert (status, err) == (2, "error: there is no 'model.none*'\n")
    lines = out.splitlines()
    assert lines[:3] == [
        "'made': complete",
        "'made/eval-000.bin': 207 tokens, 20 documents, checksums of 'eval-000.sums' agree",
        "'made/train-000.bin': 1893 tokens, 180 documents, checksums of 'train-000.sums' agree",
    ]
    finite = "checksums agree, all weights are finite"
    assert lines[3:5] == [f"'ckpt/step_0000000{n}': step {n}, {finite}" for n in (1, 2)]
    assert lines[5] == f"'out': Qwen3ForCausalLM, {finite}"
    assert "'data/eval.bin': 113 tokens, no checksums" in lines
    assert not any("DAMAGED" in line for line in lines)


class Exchange:
    """Gathers this process's value, and the value of the other one of two."""

    def __init__(self, index, other):
        self.index, self.other = index, other

    def gather(self, value):
        values = [self.other(value)] * 2
        values[self.index] = value
        return values


def two(index, other=lambda value: value):
    """The world of one of two processes, whose values the other one has as well."""
    return World((1, 1), ("a", "b"), index, Exchange(index, other))


def test_what_was_hashed_is_not_read_again(tmp_path):
    """Two processes that see the same files hash a half of them each, else all."""
    path = shutil.copytree("ckpt/step_00000002", tmp_path / "step_00000002")
    names = sorted(file.name for file in path.glob("*.safetensors"))

    def read(world):
        before = _digest.cache_info().misses
        assert problem_of(path, world) is None
        return _digest.cache_info().misses - before

    assert len(names) == 3
    assert [read(two(0)), read(two(1)), read(World())] == [2, 1, 0]
    for name in names:
        os.utime(path / name)

    def copied(value):
        ((manifest, _), problem) = value if isinstance(value, tuple) else ((None, None), value)
        return value if manifest is None else ((manifest, "other files"), problem)

    assert read(two(1, copied)) == 3
    another = problem_of(path, two(0, lambda value: value and (("another", ""), None)))
    assert another == f"'{path}' is not the same checkpoint on machine 'a' and on machine 'b'"
    (path / names[0]).write_bytes(b"x" * (path / names[0]).stat().st_size)
    assert names[0] in problem_of(path)


@pytest.mark.parametrize(
    ("name", "at", "arguments"),
    [
        ("made/train-000.bin", 5000, ["made"]),
        ("made/train-000.bin", 20, ["made/train-000.docs"]),
        ("made/eval-000.docs", 100, ["made/eval-000.bin"]),
        ("made/eval-000.sums", 45, ["made/*.bin"]),
        ("ckpt/step_00000001/checkpoint.json", 900, ["ckpt"]),
        ("ckpt/step_00000001/adam.v.shard_000_of_001.safetensors", -4, ["ckpt/step_00000001"]),
        ("out/model.safetensors", -4, ["out"]),
        ("out/model.safetensors", 3, ["out/model.safetensors"]),
        ("out/config.json", 0, ["out"]),
        ("data/train-0.bin", -1, ["data/train-0.bin"]),  # an id outside the vocabulary
    ],
)
def test_what_is_damaged(capsys, name, at, arguments):
    content = Path(name).read_bytes()
    changed = bytearray(content)
    changed[at] ^= 64
    Path(name).write_bytes(changed)
    try:
        status, out, err = check(capsys, *arguments, "data/eval.bin")
    finally:
        Path(name).write_bytes(content)
    assert status == 2
    assert "error: " in err and err.count("\n") == 1
    assert Path(name).parent.name in err
    assert "'data/eval.bin': 113 tokens, no checksums\n" in out, "the others are looked at, too"


@pytest.fixture(scope="module")
def shards(place, tmp_path_factory):
    """A folder of seven token files."""
    out = tmp_path_factory.mktemp("shards")
    run(place / "a.jsonl", out=out, eval_fraction=0.1, shard_tokens=300)
    assert len(list(out.glob("train-*.bin"))) == 7
    return out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train-000.bin", "train-000.bin' is missing, of 7 that were written for train: copy the"),
        ("train-006.bin", "train-006.bin' is missing, of 7"),
        ("eval-000.bin", "eval-000.bin' is missing, of 1"),
        ("train-003.docs", "train-003.docs' is missing: copy it together with '"),
        ("train-003.sums", "train-003.sums' is missing: copy it together with '"),
        ("tokenizer/tokenizer.json", "tokenizer' is missing or damaged: copy the"),
    ],
)
@pytest.mark.parametrize("link", [False, True])
def test_what_is_missing(capsys, shards, tmp_path, name, said, link):
    made = shutil.copytree(shards, tmp_path / "made")
    (made / name).unlink()
    if link:  # to itself
        (made / name).symlink_to(Path(name).name)
    status, _, err = check(capsys, made)
    assert status == 2
    assert re.search(said, err) or (link and name.endswith((".bin", ".sums")) and name in err)


def test_a_run_says_which_token_files_are_missing(capsys, shards, tmp_path):
    made = shutil.copytree(shards, tmp_path / "made")
    data = {"train_file": made / "train*.bin", "eval_file": made / "eval*.bin"}
    places = {"out_dir": "out-few", "checkpoint_dir": "ckpt-few", "log_file": "few.json"}
    assert train(steps=0, **data, **places) == 0
    assert "is missing" not in capsys.readouterr().out
    (made / "train-003.bin").unlink()
    manifest = json.loads((made / "tokenize.json").read_text())
    assert train(steps=0, **data, **places, overwrite="") == 0
    said = "train-003.bin' is missing, of 7 that were written for train: what is there is read\n"
    assert capsys.readouterr().out.count(said) == 1
    (made / "tokenize.json").write_text(json.dumps(manifest | {"complete": False}))
    (made / "train-003.bin.partial").touch()
    manifest["splits"]["train"] = 3 * 300 + 5
    (made / "tokenize.json").write_text(json.dumps(manifest | {"complete": False}))
    [*lines] = gaps(made.glob("*.bin"))
    assert lines == [
        f"WARNING: '{made}' is unfinished: the same tokenize command goes on; what is there is read"
    ]
    (made / "train-003.bin.partial").unlink()
    assert "train-003.bin.partial' is missing" in gaps(made.glob("train*.bin"))[0]
    (made / "tokenize.json").write_text("{}")
    assert gaps(made.glob("*.bin")) == []


def test_token_files_that_were_exchanged(capsys, shards, tmp_path):
    made = shutil.copytree(shards, tmp_path / "made")
    for suffix in ("bin", "docs", "sums"):
        shutil.copy(made / f"train-006.{suffix}", made / f"train-001.{suffix}")
        shutil.copy(made / f"train-006.{suffix}", made / f"train-007.{suffix}")
    status, out, err = check(capsys, made)
    assert status == 2 and out.count("DAMAGED") == 2
    assert "train-001.bin' has 93 tokens and a vocabulary of 257, but '" in err
    assert "tokenize.json' speaks of 300 tokens: copy" in err
    assert "tokenize.json' speaks of no such file: copy" in err


def test_weights_that_are_not_numbers(capsys):
    """Their checksums agree: they were written so."""
    from llmq.checkpoint.manifest import digest_of

    path = Path("ckpt/step_00000002")
    manifest = json.loads((path / "checkpoint.json").read_text())
    file = next(f for f in manifest["files"] if f["group"] == "weights")
    content = (path / file["name"]).read_bytes()
    before = (path / "checkpoint.json").read_text()
    import hashlib

    bad = content[:-4] + b"\xff\xff\xff\xff"
    file["sha256"] = hashlib.sha256(bad).hexdigest()
    (path / file["name"]).write_bytes(bad)
    (path / "checkpoint.json").write_text(json.dumps(manifest | {"sha256": digest_of(manifest)}))
    status, _, err = check(capsys, path)
    (path / file["name"]).write_bytes(content)
    (path / "checkpoint.json").write_text(before)
    assert status == 2
    assert "holds NaN or infinity" in err


def test_nothing_to_check(capsys):
    status, _, err = check(capsys, "data")
    assert status == 2
    assert "error: 'data' holds no checkpoint, no model and no token files" in err


def test_what_a_run_has_not_moved_is_said(tmp_path, monkeypatch, capsys):
    """Behind projections that begin at zero nothing has a gradient in the first step, and all has
    one later: said by the run, and of its checkpoints."""
    monkeypatch.chdir(make_workplace(tmp_path))
    started = {"init_proj_to_zero": True, "save_training_state": True, "opt_m_dtype": "e4m3"}
    for gpus in (1, 2):
        assert train(**started, steps=1, gpus=gpus, zero_level=2) == 0
        out = capsys.readouterr().out
        (line,) = [text for text in out.splitlines() if "have not moved" in text]
        assert re.match(r"WARNING: \d+ of \d+ trained tensors have not moved, no gradient", line)
        assert "layers.0.qkv" in line or "attn" in line or "input_layernorm" in line
        assert _run(["check", "--trained", "ckpt"]) == 0
        said, *names = capsys.readouterr().out.splitlines()
        assert said.split(": ")[1].split(",")[0].startswith(line.split()[1] + " of ")
        assert len(names) == int(line.split()[1])
    assert train(**started, steps=3) == 0
    assert "have not moved" not in capsys.readouterr().out
    assert _run(["check", "--trained", "ckpt"]) == 0
    assert "trained tensors have moved by step 3" in capsys.readouterr().out
    assert _run(["check", "--trained", "out"]) == 2
    assert "--trained: 'out' is no checkpoint" in capsys.readouterr().err
