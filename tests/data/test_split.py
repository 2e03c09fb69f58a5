"""A validation set that is split off the training files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmq.data.epoch_plan import Split
from llmq.data.loader import DataLoader
from llmq.data.tokens import TokenWriter
from llmq.options.options_io import make_config
from tests.runs import make_workplace, records, train

T = 4


@pytest.fixture
def files(tmp_path):
    """Files of 30, 7, 0 and 1 sequences; every token has a value of its own."""
    start, paths = 0, []
    for number, chunks in enumerate((30, 7, 0, 1)):
        tokens = np.arange(start, start + chunks * T + 1)
        paths.append(tmp_path / f"{number}.bin")
        with TokenWriter(paths[-1], 1000) as writer:
            writer.write(tokens)
        start += len(tokens)
    return paths


def targets(files, fraction, held_out, world=1):
    """The targets of all ranks' batches of an epoch."""
    seen = []
    for rank in range(world):
        with DataLoader(
            files, seq_len=T, micro_batch=1, seed=5, vocab_size=1000, rank=rank, world_size=world,
            everything=held_out, split=Split(fraction, held_out),
        ) as loader:  # fmt: skip
            for _ in range(loader.batches_per_epoch):
                found = loader.next_batch().targets
                seen += found[found >= 0].tolist()
    return seen


@pytest.mark.parametrize("fraction", [0.01, 0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("world", [1, 2])
def test_no_target_is_on_both_sides(files, fraction, world):
    trained, validated = (targets(files, fraction, side, world) for side in (False, True))
    assert not set(trained) & set(validated)
    assert len(set(validated)) == len(validated) == T * max(int(38 * fraction), 1)
    if world == 1:
        assert len(set(trained) | set(validated)) == 38 * T


def test_the_ends_of_the_files_are_held_out():
    assert Split(0.1, True).of([30, 7, 0, 1]) == ([27, 7, 0, 1], [3, 0, 0, 0])
    assert Split(0.1, False).of([30, 10]) == ([0, 0], [27, 9])
    assert Split(0.02, True).of([3, 4, 0]) == ([3, 3, 0], [0, 1, 0]), "at least one"
    assert Split(0.5, True).of([1] * 6) == ([1, 0] * 3, [0, 1] * 3)


def test_a_train_file_alone_is_split():
    assert make_config({"train-file": "a.bin"}).eval_file == "split"
    assert make_config({"train-file": "a.bin", "eval-file": "b.bin"}).eval_file == "b.bin"
    assert make_config({"train-file": "a.bin", "eval-file": "none"}).eval_file == "none"
    assert make_config({}).eval_file.endswith("eval*.bin")


def test_a_run_with_a_split(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_workplace(tmp_path))
    Path("data/eval.bin").unlink()
    split = {"eval_file": "split:0.1", "ckpt_interval": 2}
    assert train(steps=3, **split) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\nValidation: 2 sequences at the ends of the training files, never trained on\n" in out
    assert [r["eval_tokens"] for r in records("eval")] == [32]
    assert {r["split"]: r["tokens"] for r in records("dataset")} == {"train": 18 * 16, "eval": 32}
    manifest = json.loads(Path("ckpt/step_00000002/checkpoint.json").read_text())
    assert manifest["options"]["eval_file"] == "split:0.1"
    assert train(steps=4, **split, **{"continue": ""}) == 0
    assert train(steps=4, **split | {"eval_file": "split:0.3"}, **{"continue": ""}) == 2
    changed = "the training files changed since the checkpoint (or the part of"
    assert changed in capsys.readouterr().err
    assert train(steps=4, **split | {"eval_file": "none"}, **{"continue": ""}) == 2
    assert changed in capsys.readouterr().err


@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_fractions_that_leave_nothing(fraction, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_workplace(tmp_path))
    assert train(steps=1, eval_file=f"split:{fraction}") == 2
    assert capsys.readouterr().err.startswith("error: --eval-file: the part of split must")
