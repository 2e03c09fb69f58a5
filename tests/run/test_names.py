"""Names of runs and folders stand for what these have written, in every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmq.commands.cli import _run
from llmq.options.options_io import make_config
from llmq.run.run_paths import find_log, find_model
from tests.runs import make_workplace, train


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A workplace with a run called talks, whose model lies where runs leave it."""
    monkeypatch.chdir(make_workplace(tmp_path))
    assert train(steps=1, name="talks", out_dir=None, checkpoint_dir=None, log_file="talks.json",
                 save_training_state=True) == 0  # fmt: skip
    return tmp_path


def test_a_name_stands_for_the_model_of_its_run(place, capsys):
    Path("texts.txt").write_text("a text of more than one sequence")
    for command in (
        "sample talks --prompt=a --max-new-tokens=2 --device=cpu",
        "sample output/talks --prompt=a --max-new-tokens=2 --device=cpu",
        "eval talks --task texts.txt --device=cpu",
        "export talks --out exported",
        "tokenize texts.txt --tokenizer=bytes --out=data/texts --eval-fraction=0",
        "score talks data/texts --out scores --device=cpu --model-dtype=fp32 --seq-len=16",
        "show texts",
    ):
        assert _run(command.split()) == 0, (command, capsys.readouterr().err)
    assert Path("exported/config.json").is_file()
    Path("output").rename("gone")  # what is left are checkpoints
    assert find_model("talks") == "ckpt/talks"
    assert _run("sample talks --prompt=a --max-new-tokens=2 --device=cpu".split()) == 0
    assert find_model("gone/talks") == "gone/talks" and find_model("x/talks") == "x/talks"


def test_adapters_find_their_model(place, capsys):
    lora = {"lora_rank": 2, "lora_targets": "q,v", "from_scratch": None, "model": "output/talks"}
    assert train(steps=1, name="ada", out_dir=None, checkpoint_dir=None, log_file="ada.json",
                 **lora) == 0  # fmt: skip
    assert json.loads(Path("output/ada/adapter_config.json").read_text())["r"] == 2
    capsys.readouterr()
    sampled = "sample ada --prompt=a --max-new-tokens=2 --device=cpu --temperature=0"
    assert _run(sampled.split()) == 0
    own = capsys.readouterr().out
    assert _run([*sampled.replace("sample ada", "sample talks").split(), "--adapter=ada"]) == 0
    assert capsys.readouterr().out == own
    assert _run("merge ada --out merged".split()) == 0
    assert Path("merged/config.json").is_file()
    assert _run("merge talks ada --out again".split()) == 0
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("merged", "again")]
    assert weights[0] == weights[1]


def test_what_was_looked_for_is_told(place, capsys):
    assert _run("eval nobody --task texts.txt".split()) == 2
    Path("texts.txt").write_text("a text")
    capsys.readouterr()
    assert _run("eval nobody --task texts.txt --device=cpu".split()) == 2
    err = capsys.readouterr().err
    assert (
        "MODEL: 'nobody' is neither a directory nor a repository in the Hugging Face cache" in err
    )
    assert "none of output/nobody, finetune/nobody/model, ckpt/nobody, finetune/nobody/ckpt" in err
    assert _run(["plot", "nobody", "--out=x.png"]) == 2
    assert "neither 'ckpt/nobody' nor 'finetune/nobody' has one" in capsys.readouterr().err


def test_a_folder_of_a_run_stands_for_its_log_and_model(place):
    folder = place / "finetune" / "mine"
    folder.mkdir(parents=True)
    (place / "output" / "talks").rename(folder / "model")
    (place / "talks.json").rename(folder / "log.json")
    assert find_model("finetune/mine") == "finetune/mine/model" == find_model("mine")
    assert find_log("mine") == Path("finetune/mine/log.json") == find_log("finetune/mine")


def test_a_folder_of_tokenize_is_its_training_part_and_what_was_kept(place):
    config = make_config({"train-file": ["data"]})
    assert config.eval_file == config.eval_pattern == "data/eval*.bin"
    named = make_config({"train-file": ["data"], "eval-file": ["data", "more=data"]})
    assert (named.eval_pattern, named.eval_sets) == ("data/eval*.bin", {"more": "data/eval*.bin"})
    assert make_config({"train-file": ["data"], "eval-file": "split"}).splits
    assert make_config({"train-file": ["data/train*.bin"]}).splits
    (place / "more [1]").mkdir()
    (place / "data" / "eval.bin").rename(place / "more [1]" / "eval-000.bin")
    assert make_config({"train-file": ["data"]}).splits  # which kept no such part
    assert make_config({"train-file": ["data", "more [1]"]}).splits

    (place / "data" / "eval.bin").write_bytes((place / "more [1]" / "eval-000.bin").read_bytes())
    pattern = make_config({"train-file": ["data:0.5", "more [1]:0.5"]}).eval_pattern
    assert pattern == "{data/eval*.bin,more [[]1]/eval*.bin}"


def test_a_run_on_a_folder_is_the_one_on_its_patterns(place):
    made = []
    for number, how in enumerate(({"train_file": "data", "eval_file": None}, {})):
        assert train(steps=3, log_file=f"{number}.json", out_dir=f"out{number}",
                     name=f"run{number}", checkpoint_dir=f"ckpt{number}", **how) == 0  # fmt: skip
        made.append((place / f"out{number}" / "model.safetensors").read_bytes())
    assert made[0] == made[1]


def test_a_validation_part_that_is_passed_over_is_told(place, capsys):
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": "word " * 50}) for _ in range(20)))
    tokenize = "tokenize texts.jsonl --tokenizer=bytes --out=data/texts --eval-fraction=0.2"
    assert _run(tokenize.split()) == 0
    told = "'data/texts' has a validation part of its own, which is not read: give --train-file"
    for files, shown in (("data/texts/train*.bin", 1), ("data/texts", 0), ("data/texts/*.bin", 0)):
        capsys.readouterr()
        assert train(steps=1, train_file=files, eval_file=None) == 0
        assert capsys.readouterr().out.count(told) == shown
