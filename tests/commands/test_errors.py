"""Bad input to `llmq train`: one `error:` line that says what, where and what to do; status 2."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.runs import B, T, make_workplace, train, write_tokens

EVAL = "data/eval.bin"


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def tree():
    """Everything in the current folder, with its size."""
    return {str(p): p.stat().st_size for p in Path(".").rglob("*") if p.is_file()}


def refused(capsys, *expected, **changes):
    """The error line of a run that does not begin; nothing may be written."""
    before = tree()
    assert train(steps=2, **changes) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: "), err
    assert err.count("\n") == 1 or err.startswith("error: out of memory: "), err
    for text in expected:
        assert text in err
    assert out == ""
    assert tree() == before
    return err


# ------------------------------------------------------------------------------------------------
# Token files


def damaged(name, damage):
    path = Path(name)
    path.write_bytes(damage(path.read_bytes()))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_missing_token_files(capsys, split):
    refused(capsys, "nothing*.bin", "no", **{f"{split}_file": "nothing*.bin"})


@pytest.mark.parametrize("name", ["data/train-1.bin", EVAL])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-3], "bytes"),
        (lambda data: data[:500], ""),
        (lambda data: b"", ""),
        (lambda data: b"GIF89a.\n" + data[8:], "not a token file"),
        (lambda data: data[:8] + b"\x09\0\0\0" + data[12:], "version 9"),
        (lambda data: data[:20] + b"\xff\xff\0\0" + data[24:], "vocabulary"),
    ],
    ids=["truncated", "header", "empty", "magic", "version", "vocabulary"],
)
def test_damaged_token_files(capsys, name, damage, message):
    damaged(name, damage)
    refused(capsys, name, message)


@pytest.mark.parametrize("last", [257, 10**6, -1])
def test_token_id_outside_the_vocabulary(capsys, last):
    """Found as the batch with it is read: here the last one of the evaluation."""
    damaged(EVAL, lambda data: data[:-4] + last.to_bytes(4, "little", signed=True))
    assert train(steps=1, batch_size=1) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: '{EVAL}' has token id {last} at position {7 * T}")
    assert err.count("\n") == 1 or err.startswith("error: out of memory: "), err
    json.loads(Path("log.json").read_text())
    assert not Path("out").exists()


def test_too_little_data(capsys):
    short = {"drop_last": ""}
    refused(capsys, "sequences of 16 tokens, but one batch needs 64", batch_size=64, **short)
    few = "the 10 batches of an epoch are less than a step, which takes 11"
    refused(capsys, "--grad-accumulation", few, grad_accumulation=11, **short)
    write_tokens(Path(EVAL), 0)
    refused(capsys, EVAL, "has 0 sequences of 16 tokens, but one is needed")


# ------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": "two"}, "--batch-size: expected an integer"),
        ({"seq_len": 68}, "--seq-len: 68 exceeds the model's 64 positions"),
        ({"attn_bwd_chunks": 1000 * B}, f"--attn-bwd-chunks: {1000 * B} is more than --batch-size"),
        ({"new_data": ""}, "--new-data: needs --continue"),
        ({"memory_limit": "10KiB"}, "out of memory: "),
        ({"stepz": 2}, "--stepz"),
        ({"config": "nothing.yaml"}, "--config: cannot read nothing.yaml"),
    ],
)
def test_options(capsys, changes, message):
    refused(capsys, message, **changes)


def test_no_gpu(capsys, monkeypatch):
    from llmq.base.errors import LlmqError
    from llmq.runtime import cuda_api

    def missing(index):
        raise LlmqError("no NVIDIA driver is installed; install one, or use --device cpu")

    monkeypatch.setattr(cuda_api, "device_spec", missing)
    refused(capsys, "no NVIDIA driver", "--device cpu", device="cuda")


# ------------------------------------------------------------------------------------------------
# Models


def export_model():
    assert train(steps=1) == 0
    os.rename("out", "exported")
    os.remove("log.json")


def test_model_directories(capsys):
    Path("empty").mkdir()
    refused(capsys, "there is no empty/config.json", model="empty", from_scratch=False)
    refused(capsys, "'nowhere' is not a directory", model="nowhere", from_scratch=False)
    refused(capsys, "no preset is called 'tinny'", "did you mean tiny", model="tinny")
    refused(capsys, "'model' has neither model.safetensors nor", from_scratch=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold one JSON object"),
        ("{}", "architectures"),
        (json.dumps({"architectures": ["MambaForCausalLM"]}), "MambaForCausalLM"),
    ],
)
def test_unreadable_configs(capsys, content, message):
    Path("model/config.json").write_text(content)
    refused(capsys, "model/config.json" if content == "{" else "model", message)


def without_a_tensor(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def with_a_wrong_shape(tensors):
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_tensor, "lacks model.layers.1.mlp.up_proj.weight"),
        (with_a_wrong_shape, "model.layers.0.self_attn.k_proj.weight"),
    ],
)
def test_missing_and_misshaped_tensors(capsys, change, message):
    export_model()
    capsys.readouterr()
    path = "exported/model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    refused(capsys, "exported/model.safetensors", message, model="exported", from_scratch=False)


def test_truncated_weights(capsys):
    export_model()
    capsys.readouterr()
    damaged("exported/model.safetensors", lambda data: data[:-100])
    refused(capsys, "exported/model.safetensors", model="exported", from_scratch=False)


# ------------------------------------------------------------------------------------------------
# Places to write to


def test_places_that_cannot_be_written_are_found_at_the_start(capsys):
    Path("file").write_text("x")
    refused(capsys, "--out-dir: cannot write into 'file/out': 'file' is not a", out_dir="file/out")
    refused(capsys, "--out-dir: cannot write into 'file'", out_dir="file")
    refused(capsys, "--checkpoint-dir: cannot write", checkpoint_dir="file/a/b")
    refused(capsys, "cannot write 'file/log.json'", log_file="file/log.json")
    refused(capsys, "cannot write 'data'", log_file="data")


def test_read_only_places(capsys, monkeypatch):
    """The super-user can write there all the same: only asking tells."""
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != Path("ro") and real(path, mode)
    )
    Path("ro").mkdir()
    refused(capsys, "--out-dir: cannot write into 'ro/x': 'ro' is not writable", out_dir="ro/x")


def test_full_disk_at_the_export(capsys, monkeypatch):
    """An earlier export stays as it is."""
    assert train(steps=1, save_training_state=True) == 0
    before = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    capsys.readouterr()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("llmq.checkpoint.hf.write_safetensors", full)
    assert train(steps=2, **{"continue": ""}) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the disk is full, writing '")
    assert "out" in err
    assert err.count("\n") == 1 or err.startswith("error: out of memory: "), err
    assert {p.name: p.read_bytes() for p in Path("out").iterdir()} == before


# ------------------------------------------------------------------------------------------------
# Checkpoints


def continued(capsys, **changes):
    """The error line of a run that cannot be continued."""
    assert train(steps=4, **{"continue": ""}, **changes) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1 or err.startswith("error: out of memory: "), err
    return err


def test_damaged_checkpoints(capsys):
    """A flipped byte, a short file, a missing file: each is named, and nothing is loaded."""
    assert train(steps=2, save_training_state=True) == 0
    capsys.readouterr()
    folder = Path("ckpt/step_00000002")
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 0x10
        for damage in (bytes(flipped), content[:-5]):
            path.write_bytes(damage)
            assert f"{path}'" in continued(capsys)
        if path.name != "checkpoint.json":
            path.unlink()
            assert f"{path}' is missing" in continued(capsys)
        path.write_bytes(content)
    assert train(steps=4, **{"continue": ""}) == 0


def test_checkpoints_of_something_else(capsys):
    assert train(steps=2, save_training_state=True) == 0
    capsys.readouterr()
    assert "sequence length changed" in continued(capsys, seq_len=2 * T)
    assert "training files changed" in continued(capsys, train_file="data/train-0.bin")
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    assert "is of another model" in continued(capsys)


def test_unfinished_checkpoints_do_not_count(capsys):
    assert train(steps=2, save_training_state=True) == 0
    shutil.copytree("ckpt/step_00000002", "ckpt/step_00000009.tmp")
    shutil.copytree("ckpt/step_00000002", "ckpt/step_00000008")
    os.remove("ckpt/step_00000008/checkpoint.json")
    assert train(steps=4, **{"continue": ""}) == 0
    assert "Loading checkpoint 2 from" in capsys.readouterr().out
    assert not Path("ckpt/step_00000009.tmp").exists(), "as large as a checkpoint, and of no use"
