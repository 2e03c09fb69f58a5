"""Runs of `llmq train` with adapters, from the command line to PEFT's directory and on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from llmq.commands.cli import _run
from tests.runs import make_workplace, records, train

LORA = {"from_scratch": None, "lora_rank": 4, "lora_dropout": 0.1, "lora_targets": "q,v"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A workplace whose model has weights."""
    monkeypatch.chdir(make_workplace(tmp_path))
    assert train(steps=0, out_dir="base", tokenizer=None, save_training_state=True,
                 checkpoint_dir="base.ckpt") == 0  # fmt: skip
    (tmp_path / "model" / "model.safetensors").write_bytes(
        (tmp_path / "base" / "model.safetensors").read_bytes()
    )
    return tmp_path


def losses(log: str = "log.json") -> list[float]:
    return [record["loss"] for record in records("step", log)]


def test_train_continue_and_go_on(place, capsys):
    """Adapters of one run and of two are equal; other runs go on from the exported adapters."""
    how = {"name": "one", "log_file": "one.json", "out_dir": "one", "learning_rate": None}
    assert train(steps=6, **how, **LORA) == 0
    # Users of PEFT have it so.
    out = capsys.readouterr().out
    assert re.search(r"adapters of rank 4 on \w+ weights, alpha 8, scaling 2", out)
    assert "; 0.0002, constant\n" in out
    assert json.loads(Path("one/adapter_config.json").read_text())["lora_alpha"] == 8
    adapter = load_file("one/adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * 2
    saved = {"name": "two", "log_file": "two.json", "out_dir": "two", "checkpoint_dir": "two.ckpt"}
    saved["learning_rate"] = None
    assert train(steps=3, save_training_state=True, **saved, **LORA) == 0
    assert train(**{"continue": "", "steps": 6}, overwrite=None, **saved, **LORA) == 0
    assert losses("two.json") == losses("one.json")
    for name, value in load_file("two/adapter_model.safetensors").items():
        assert (value == adapter[name]).all()
    # --continue has the adapters' options from the checkpoint, and the model's place.
    assert (
        _run(["train", "--continue", "--name=two", "--checkpoint-dir=two.ckpt", "--steps=7"]) == 0
    )

    capsys.readouterr()
    assert _run(["check", "two.ckpt", "one"]) == 0
    assert "agree, all weights are finite" in (out := capsys.readouterr().out)
    assert "'one': 8 tensors, header and length agree, checksums agree" in out

    more = {"steps": 1, "from_scratch": None, "adapter": "one", "name": "more"}
    assert train(out_dir="more", **more) == 0
    said = json.loads(Path("more/adapter_config.json").read_text())
    assert (said["r"], said["target_modules"]) == (4, ["q_proj", "v_proj"])
    assert said["lora_dropout"] == 0.1
    capsys.readouterr()
    assert train(**more, lora_rank=8) == 2
    assert "--lora-rank=8: 'one' has --lora-rank=4: leave it out" in capsys.readouterr().err
    assert train(**more | {"save_training_state": True}) == 0
    again = more | {"continue": "", "overwrite": None, "save_training_state": True, "steps": 2}
    for folder, effect in (("one", True), ("two", False)):
        capsys.readouterr()
        assert train(**again | {"adapter": folder}) == 0
        warned = "warning: --adapter=two has no effect: the run goes on" in capsys.readouterr().err
        assert warned is not effect
    other = {"out_dir": "norms", "name": "norms", "checkpoint_dir": "norms.ckpt"}
    assert train(steps=1, train="norms", **other, **LORA) == 0
    capsys.readouterr()
    assert train(**again | {"adapter": "norms"}) == 2
    said = "error: no --train: 'norms' has --train=norms: leave --adapter out"
    assert said in capsys.readouterr().err
    assert _run(["merge", "model", "one", "--out", "merged", "--model-dtype", "fp32"]) == 0
    # Without a word about it the model's own format: fp32 here, as the run's.
    for command in (
        ["merge", "model", "one", "--out", "own"],
        ["export", "--checkpoint-dir", "base.ckpt", "--out-dir", "again"],
    ):
        assert _run(command) == 0
    capsys.readouterr()
    for name in ("own", "again"):
        assert {str(v.dtype) for v in load_file(f"{name}/model.safetensors").values()} == {
            "float32"
        }
    plan = ["--model=model", "--adapter=one", "--device=cpu", "--json", "--seq-len=16"]
    assert _run(["plan", *plan]) == 0
    text = capsys.readouterr().out
    weights = Path("one/adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert _run(["check", "one"]) == 2
    assert "adapter_model.safetensors' is damaged: wrong checksum" in capsys.readouterr().err
    assert json.loads(text[text.index("{") :])["trained_parameters"] == sum(
        value.size for value in adapter.values()
    )


def test_adapters_need_a_trained_model(place, capsys):
    assert train(steps=1, lora_rank=4) == 2
    assert "--lora-rank: adapters need a trained model" in capsys.readouterr().err
    assert train(steps=1, adapter="base") == 2
    assert "--adapter: needs the model that it adapts, not --from-scratch" in (
        capsys.readouterr().err
    )
    assert train(steps=1, from_scratch=None, adapter="base") == 2
    assert "--adapter: 'base' holds no adapters" in capsys.readouterr().err


def test_adapters_that_do_not_fit(place, capsys):
    """Adapters that do not fit are one line, in `plan` too, which reads no weights."""
    saved = {"name": "one", "checkpoint_dir": "one.ckpt", "out_dir": "one"}
    assert train(steps=2, save_training_state=True, **saved, **LORA) == 0
    plan = ["plan", "--model=model", "--device=cpu", "--seq-len=16"]
    capsys.readouterr()
    for more, message in (
        (["--train=norms"], "--train=norms: 'one' has no --train: leave it out"),
        (["--lora-targets=q"], "--lora-targets=q: 'one' has --lora-targets=q,v: leave it out"),
    ):
        assert _run([*plan, "--adapter=one", *more]) == 2
        assert message in capsys.readouterr().err
    assert _run([*plan[:1], "--model=one"]) == 2
    assert "--model: 'one' holds adapters: give the model they are of" in capsys.readouterr().err
    for base, message in (
        ("one", "BASE: 'one' holds adapters: give the model they are of, then these"),
        ("one.ckpt", "BASE: 'one.ckpt' is neither the directory of a model nor"),
        ("tiny", "BASE: 'tiny' is neither the directory of a model nor"),
    ):
        assert _run(["merge", base, "model", "--out=merged"]) == 2
        assert message in capsys.readouterr().err
    assert _run([*plan, "--adapter=one.ckpt"]) == 2
    assert "--adapter: 'one.ckpt' holds checkpoints: `llmq export` one" in capsys.readouterr().err
    config = json.loads(Path("model/config.json").read_text()) | {"num_hidden_layers": 3}
    Path("deeper").mkdir()
    Path("deeper/config.json").write_text(json.dumps(config))
    assert _run([*plan, "--adapter=one", "--model=deeper"]) == 2
    assert "lacks base_model.model.model.layers.2.self_attn.q_proj" in capsys.readouterr().err


def test_the_same_adapters_in_other_words(place, capsys):
    """Options beside --adapter or a checkpoint are compared by the matrices that they name."""
    run = {"from_scratch": None, "lora_rank": 4, "lora_dropout": 0}
    named = {"lora_targets": "q,k,v,o,gate,up,down", "train": "norms,embeddings"}
    saved = {"save_training_state": True, "name": "one", "out_dir": "one"}
    assert train(steps=1, **saved, **named, **run) == 0
    plan = ["plan", "--model=model", "--device=cpu", "--seq-len=16", "--adapter=one"]
    for same in (
        "--lora-targets=all",
        "--lora-targets=down,up,gate,o,v,k,q",
        "--lora-targets=.*_proj",
        "--lora-layers=0,1",
        "--lora-layers=0-1",
        "--train=embeddings,norms",
        "--lora-rank-pattern=q_proj=4",
    ):
        assert _run([*plan, same]) == 0, (same, capsys.readouterr().err)
    capsys.readouterr()
    for other in ("--lora-targets=q", "--lora-layers=0", "--lora-rank-pattern=q_proj=2"):
        assert _run([*plan, other]) == 2
        assert f"error: {other}: 'one' has " in capsys.readouterr().err
    again = {"continue": "", "overwrite": None, "name": "one", "save_training_state": True}
    spelled = {"lora_targets": ".*_proj", "lora_layers": "0,1", "train": "embeddings,norms"}
    assert train(steps=2, **again, **spelled, **run) == 0
    out = capsys.readouterr().out
    assert not any(f"--{name} is " in out for name in ("lora-targets", "lora-layers", "train"))
    assert train(steps=3, **again, **spelled | {"lora_layers": "1"}, **run) == 2
    assert "continue it so, not with --lora-layers=1" in capsys.readouterr().err


def test_all_targets_by_name(place, capsys):
    """A run goes on whether they are named one by one or together; with others it does not."""
    run = {"save_training_state": True, "name": "run", "from_scratch": None, "lora_rank": 4}
    names = "q,k,v,o,gate,up,down"
    assert train(steps=1, lora_targets=names, **run) == 0
    again = {"continue": "", "overwrite": None}
    assert train(steps=2, lora_targets="all", **again, **run) == 0
    assert train(steps=3, lora_targets=names, **again, **run) == 0
    capsys.readouterr()
    assert train(steps=4, lora_targets="q,v", **again, **run) == 2
    assert "continue it so, not with --lora-targets=q,v" in capsys.readouterr().err
    assert train(steps=4, train="norms", **again, **run) == 2
    assert "was made with no --train: continue it so, not with --train=norms" in (
        capsys.readouterr().err
    )
