"""Checkpoints that lie apart: each of several machines has its part on a disk of its own."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import pytest

from llmq.checkpoint.disks import Disks, joined
from llmq.checkpoint.manifest import MANIFEST, read_manifest
from llmq.commands.cli import _run
from llmq.runtime.world import World
from tests.mpi import case, machine_folder, run
from tests.runs import make_workplace, records, train, write_tokens

pytest.importorskip("mpi4py")

OPTIONS = {"batch_size": 1, "grad_accumulation": 1, "eval_file": "none", "overwrite": None}
OPTIONS |= {"save_training_state": True, "ckpt_interval": 2, "ckpt_keep_n": 2, "steps": 12}
OPTIONS |= {"shard_over": "world"}  # machines of unequal size
SPREAD = [["--gpus=2"], ["--gpus=1"]]
AGAIN = {"continue": ""}
GROUPS = {"shard_over": "machine"}  # each machine has all shards
PART = re.compile(r".*\.shard_(\d+)_of_003\.safetensors")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    write_tokens(Path("data/train-3.bin"), 30, seed=5)
    for name in "abcdefw":
        machine_folder(name)


def listing(machine: str) -> list[str]:
    return sorted(path.name for path in Path(machine, "ckpt").glob("[!.]*"))


def part(machine: str, step: int) -> dict[str, bytes]:
    folder = Path(machine, "ckpt", f"step_{step:08d}")
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def ranks_of(files: dict[str, bytes]) -> set[int]:
    return {int(PART.fullmatch(name)[1]) for name in files}


def alone(machine: str, **changes: object) -> int:
    """A run in one process."""
    with contextlib.chdir(machine):
        return train(**OPTIONS | {"gpus": 3} | changes)


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error")]


def test_who_sees_whose_files():
    assert joined([0b11, 0b11]) == (0, 0)
    assert joined([0b01, 0b11]) == (0, 0), "the second one's file came late to the first"
    assert joined([0b0011, 0b0011, 0b1100, 0b1100]) == (0, 0, 2, 2)
    assert joined([0b101, 0b010, 0b101]) == (0, 1, 0)
    world = World((1, 2, 1, 1), ("a", "a", "b", "c"), 0)
    assert Disks((0, 0, 2, 3)).names(world) == ("a", "a", "a", "b", "c")
    assert Disks((0, 1, 2, 2)).names(world) == ("a, process 0", *["a, process 1"] * 2, "b", "b")
    assert Disks((0, 0, 0, 0)).names(world) is None


def test_machines_that_share_no_disk(capfd):
    stopped = {"process": 1, "step": 4, "what": "terminate"}
    on_ab = {"machines": ["a", "b"], "ckpt_background": True, **OPTIONS}
    turned = [["--gpus=1"], ["--gpus=2"]]
    _, out, err = run(
        2,
        case(stopped, own=SPREAD, **on_ab),
        case(own=SPREAD, **on_ab | AGAIN | {"steps": 7}),
        case(own=turned, **on_ab | AGAIN | {"steps": 9}),  # each reads what the other has
    )
    assert "Stopped by SIGTERM after 5 steps; go on with --continue" in out
    assert errors(err) == [] and "passed over" not in err, err
    assert "Checkpoints lie apart: 'ckpt' is one of each machine, 'a', 'b'" in out

    # Each machine has the parts of its ranks, and the same manifest.
    assert listing("a") == listing("b") and listing("a")[1:] == ["step_00000008", "step_00000009"]
    parts = [part(machine, 9) for machine in "ab"]
    assert [ranks_of(files) for files in parts] == [{0}, {1, 2}]
    paths = [Path(machine, "ckpt/step_00000009", MANIFEST) for machine in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert read_manifest(paths[0])["distributed"] == {"world": 3, "machines": ["a", "b", "b"]}
    assert alone("w", steps=9) == 0
    assert parts[0] | parts[1] == part("w", 9)

    # All parts in one directory are a checkpoint of one machine.
    with contextlib.chdir("a"):
        assert _run(["check", "ckpt/step_00000009"]) == 0
    said = capfd.readouterr().out.splitlines()[-1]
    assert said.endswith("a part of step 9, 3 of 9 files, whose checksums agree; the others were "
                         "written on machine 'b'")  # fmt: skip
    assert alone("a", steps=10, **AGAIN) == 2
    text = "what machine 'b' wrote is not here: copy it into this directory, or start the run on"
    assert text in capfd.readouterr().err
    shutil.copytree("a/ckpt", "c/ckpt")
    shutil.copytree("a/ckpt", "e/ckpt")
    shutil.copytree("b/ckpt", "f/ckpt")
    next(Path("f/ckpt/step_00000009").glob("adam.m*")).write_bytes(b"damaged")
    for name in part("b", 9):
        shutil.move(f"b/ckpt/step_00000009/{name}", "a/ckpt/step_00000009")
    shutil.rmtree("b/ckpt")
    assert alone("a", steps=10, **AGAIN) == 0

    # And back, where one machine has all and the other nothing; what is nowhere is refused.
    again = {"own": SPREAD, **OPTIONS, **AGAIN}
    _, _, err = run(
        2,
        case(machines=["a", "b"], **again),
        case(machines=["c", "d"], **again | {"steps": 10}),
        case(machines=["e", "f"], **again),
    )
    assert len(errors(err)) == 1 and text in errors(err)[0], err
    assert "passed over checkpoint 'ckpt/step_00000009': machine 'f': checkpoint file" in err
    assert alone("w", steps=12, **AGAIN) == 0
    for first, second in ("ab", "ef"):
        parts = [part(machine, 12) for machine in (first, second)]
        assert [ranks_of(files) for files in parts] == [{0, 1}, {2}]
        assert parts[0] | parts[1] == part("w", 12)
        assert listing(first)[-1:] == listing(second)[-1:] == ["step_00000012"]


def test_a_disk_of_one_machine_that_refuses():
    """Files that cannot be written, and a checkpoint that can be made visible on the other only;
    also where threads write."""
    options = OPTIONS | {"gpus": 1, "steps": 3, "save_training_state": False}
    options |= {"debug_time_breakdown": ""}
    cases = {"full": ("disk full", False), "nameless": ("no names", False)}
    cases |= {"full-behind": ("disk full", True), "nameless-behind": ("no names", True)}
    _, out, _ = run(
        2,
        *(
            case(
                {"process": 1, "step": 1, "what": what}, machines=["a", "b"], **options,
                checkpoint_dir=f"{name}/ckpt", out_dir=f"{name}/out", log_file=f"{name}/log.json",
                ckpt_background=background,
            )
            for name, (what, background) in cases.items()
        ),
    )  # fmt: skip
    assert out.count("status of process 0: 0") == 4, out
    warnings = [line for line in out if line.startswith("WARNING: no checkpoint of step 2: proc")]
    assert len(warnings) == 4 and all("on machine 'b'" in line for line in warnings), out
    for name in cases:
        assert listing(f"a/{name}") == listing(f"b/{name}") == []
        assert records("cmd", f"a/{name}/log.json")[0]["machines"] == ["a", "b"]
        parts = [r for r in records("info", f"a/{name}/log.json") if r["type"] == "time-breakdown"]
        assert [(r["step"], r["gpu"]) for r in parts] == [
            (s, rank) for s in range(3) for rank in (0, 1)
        ]


def test_what_was_split_from_the_model_lies_apart():
    """Each machine splits the model again by what both have written."""
    assert train(steps=0, out_dir="weights", tokenizer=None) == 0
    shutil.copy("weights/model.safetensors", "model")
    split = {"from_scratch": None, "lora_rank": 4, "lora_init": "pissa", "base_dtype": "nf4"}
    _, _, err = run(
        2,
        case(machines=["a", "b"], own=SPREAD, **OPTIONS | split | {"steps": 2}),
        case(machines=["a", "b"], own=SPREAD, **OPTIONS | AGAIN | split | {"steps": 3}),
        case(machines=["c", "d"], gpus=2, **OPTIONS | split | {"steps": 2} | GROUPS),
        case(machines=["c", "d"], gpus=2, **OPTIONS | AGAIN | split | {"steps": 3} | GROUPS),
        case(machines=["e", "f"], gpus=2, **OPTIONS | split | {"steps": 3} | GROUPS),
    )
    assert errors(err) == [], err
    assert part("c", 3) | part("d", 3) == part("e", 3) | part("f", 3)
    assert alone("w", **split | {"steps": 3}) == 0
    parts = [part(machine, 3) for machine in "ab"]
    assert parts[0] | parts[1] == part("w", 3)
    assert any(name.startswith("adapters.begun") for name in parts[1])
