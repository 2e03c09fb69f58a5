"""A run's data, model and checkpoint are of one tokenizer, and a model stops where its data do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from llmq.base.errors import DataError
from llmq.checkpoint.manifest import MANIFEST
from llmq.commands.cli import _run
from llmq.data.identity import tokenizers_of_files
from llmq.run.trainer import Trainer
from llmq.text.tokenizer import END_OF_TEXT, ByteTokenizer, HfTokenizer
from llmq.text.tokenizer_id import check_recorded, identity_of, tokenizer_of_folder
from tests.runs import CONFIG, options
from tests.text_data import documents, run, write_bpe, write_jsonl

VOCAB = 512  # of models: at least that of every tokenizer here


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identity")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_jsonl(folder / "a.jsonl", documents(60))
        Path("bpe").mkdir()
        write_bpe(Path("bpe"))
        other = json.loads(Path("bpe/tokenizer.json").read_text())
        merges = other["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]
        Path("other").mkdir()
        Path("other/tokenizer.json").write_text(json.dumps(other))
        for name in ("bytes", "bpe", "other"):
            run("a.jsonl", out=f"data/{name}", tokenizer=name, eval_fraction=0.2)
        shutil.copytree("bpe", "model")
        write_config("model")
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """Token files of bytes and of two BPEs of one size, `bpe` and `other`; a model of `bpe`."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(folder, **changes):
    Path(folder).mkdir(exist_ok=True)
    content = CONFIG | {"vocab_size": VOCAB} | changes
    Path(folder, "config.json").write_text(json.dumps(content))


def settings(train="bpe", evaluation=None, **changes):
    files = {
        "train-file": f"data/{train}/train-*.bin",
        "eval-file": f"data/{evaluation or train}/eval-*.bin",
    }
    return options(**changes) | files


def command(**changes):
    values = settings(**{"steps": 2} | changes).items()
    return _run(
        ["train", *(f"--{name}" if v is True else f"--{name}={v}" for name, v in values if v != "")]
    )


@pytest.fixture
def trained(place):
    """A model of the tokenizer `bpe` in out and finished, its checkpoint in ckpt."""
    assert command(save_training_state=True) == 0
    shutil.copytree("out", "finished")  # a run may not write to the model that it begins with
    return place


# ------------------------------------------------------------------------------------------------
# Fingerprints


def test_a_fingerprint_does_not_depend_on_how_the_file_is_written(place):
    content = json.loads(Path("bpe/tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["truncation"] = {
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    del content["model"]["byte_fallback"]
    Path("same").mkdir()
    Path("same/tokenizer.json").write_text(json.dumps(dict(reversed(content.items())), indent=7))
    one, same, other = (HfTokenizer(Path(name)) for name in ("bpe", "same", "other"))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert one.vocab_size == other.vocab_size


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "added"])
def test_a_fingerprint_depends_on_all_that_decides_ids(place, part):
    content = json.loads(Path("bpe/tokenizer.json").read_text())
    if part == "normalizer":
        content["normalizer"] = {"type": "NFC"}
    elif part == "pre_tokenizer":
        content["pre_tokenizer"]["add_prefix_space"] = True
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if part == "post_processor":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
        )
    elif part == "added":
        tokenizer.add_tokens([AddedToken("th")])
    tokenizer.save("other/tokenizer.json")
    assert HfTokenizer(Path("other")).fingerprint != HfTokenizer(Path("bpe")).fingerprint


def test_the_files_of_bytes_are_bytes(tmp_path):
    ByteTokenizer().save(tmp_path)
    assert HfTokenizer(tmp_path).fingerprint == ByteTokenizer.fingerprint == "bytes"


def test_token_files_say_what_made_them(place):
    (path, made), *_ = tokenizers_of_files("data/bpe/*.bin")
    assert (path, made) == (Path("data/bpe/eval-000.bin"), identity_of(HfTokenizer(Path("bpe"))))
    assert str(made) == f"bpe ({made.fingerprint[:8]})"
    assert [str(m) for _, m in tokenizers_of_files("data/bytes/*.bin")] == ["bytes"] * 2
    shutil.copy("data/bpe/train-000.bin", "data/bpe/of_someone.bin")
    assert dict(tokenizers_of_files("data/bpe/of*.bin")) == {Path("data/bpe/of_someone.bin"): None}
    Path("data/bpe/tokenize.json").write_text('{"tokenizer": 5, "options": 1}')
    assert [made for _, made in tokenizers_of_files("data/bpe/*-*.bin")] == [None, None]


def test_a_fingerprint_is_computed_once(place, monkeypatch):
    expected = HfTokenizer(Path("bpe")).fingerprint
    assert tokenizer_of_folder(Path("bpe")).fingerprint == expected
    monkeypatch.setattr(HfTokenizer, "__init__", None)
    assert tokenizer_of_folder(Path("bpe")).fingerprint == expected


def test_names_of_folders(tmp_path):
    for folder, name in (
        ("hub/models--Qwen--Qwen2.5-0.5B/snapshots/0f1e", "Qwen/Qwen2.5-0.5B"),
        ("data/mine/tokenizer", "mine/tokenizer"),
        ("my-bpe", "my-bpe"),
    ):
        ByteTokenizer().save(tmp_path / folder)
        assert tokenizer_of_folder(tmp_path / folder).name == name
    assert tokenizer_of_folder(tmp_path) is None


# ------------------------------------------------------------------------------------------------
# What does not belong together


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"train": "bytes", "evaluation": "bpe"}, ("bytes", "bpe")),
        ({"train": "bpe", "evaluation": "other"}, ("bpe", "other")),
        ({"train": "{bpe,other}", "evaluation": "bpe"}, ("bpe", "other")),
        ({"train": "bytes", "model": "finished", "from_scratch": ""}, ("bytes", "bpe")),
        ({"train": "other", "model": "finished", "from_scratch": ""}, ("other", "bpe")),
        ({"train": "other", "continue": True, "from_scratch": True}, ("other", "bpe")),
    ],
)
def test_another_tokenizer_is_refused(trained, capsys, monkeypatch, changes, names):
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("llmq.run.trainer.plan_run", None)  # it is found before anything happens
        assert command(**changes) == 2
    [error] = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("warning: ")]
    assert error.startswith("error: ")
    found = [str(identity_of(_loaded(name))) for name in names]
    assert error.index(f"of the tokenizer {found[0]}, but ") < error.index(f"of {found[1]}: ")
    assert "--allow-other-tokenizer" in error
    assert command(allow_other_tokenizer=True, **{"steps": 3} | changes) == 0
    if changes.get("train") in names:  # and its model has the tokenizer of the data
        assert tokenizer_of_folder(Path("out")).name == changes["train"]


def _loaded(name):
    return ByteTokenizer() if name == "bytes" else HfTokenizer(Path(name))


def test_what_belongs_together_is_not_refused(trained, capsys):
    capsys.readouterr()
    assert command(steps=3, **{"continue": True}) == 0
    assert command(model="finished", from_scratch="", allow_other_tokenizer=True) == 0
    assert "--allow-other-tokenizer has no effect" in capsys.readouterr().err
    assert command(model="finished", from_scratch="", out_dir="again") == 0
    assert command(model="again", from_scratch="", train="bpe") == 0
    assert command(train="bytes", from_scratch=True, out_dir="new") == 0  # only the shape is used
    assert tokenizer_of_folder(Path("new")).name == "bytes"
    assert "not say which tokenizer" not in capsys.readouterr().out


def test_a_trainer_refuses_a_foreign_checkpoint(trained):
    flags = {name.replace("-", "_"): value for name, value in settings("other").items()}
    with Trainer(**flags) as trainer:
        before = trainer.weights()
        with pytest.raises(DataError, match=r"'ckpt/step_00000002' of bpe \("):
            trainer.load("ckpt")
        assert (trainer.weights()["model.norm.weight"] == before["model.norm.weight"]).all()
        assert trainer.steps_done == 0


def test_files_of_other_makers(place, capsys):
    for name in ("bpe", "bytes"):
        Path(f"data/{name}/tokenize.json").unlink()
    assert command(model="model") == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if "not say which tokenizer" in x]
    assert len(lines) == 1 and "'data/bpe/train-000.bin' and 1 more do not" in lines[0]


def test_tokenize_names_both(place):
    with pytest.raises(DataError, match=r"tokenizer \(bpe \(\w{8}\) then, other \(\w{8}\) now\)"):
        run("a.jsonl", out="data/bpe", tokenizer="other", eval_fraction=0.2)


# ------------------------------------------------------------------------------------------------
# Where a model stops


def test_a_new_model_has_the_special_tokens_of_its_data(place):
    """Not those of the preset or config, which may be outside the vocabulary or mean words."""
    strange = {"eos_token_id": [50256, 7], "bos_token_id": 3, "pad_token_id": 9}
    write_config("model", **strange)
    Path("model/tokenizer.json").unlink()
    for data, eos in (("bpe", 0), ("bytes", 256)):
        assert command(train=data, save_training_state=True, out_dir=data, checkpoint_dir="c") == 0
        for name in ("config.json", "generation_config.json"):
            written = json.loads(Path(data, name).read_text())
            ids = {x: written.get(f"{x}_token_id") for x in ("eos", "bos", "pad")}
            assert ids == {"eos": eos, "bos": eos, "pad": None}
        assert _run(["export", "--checkpoint-dir", "c", "--out-dir", f"of-{data}"]) == 0
        written = json.loads(Path(f"of-{data}/config.json").read_text())
        assert (written["eos_token_id"], written["bos_token_id"]) == (eos, eos)
        shutil.rmtree("c")


def test_a_tokenizer_that_is_not_beside_its_data_is_said(place, capsys):
    Path("model/tokenizer.json").unlink()
    lost = "whose files are not in 'data/bpe/tokenizer': the model will have no tokenizer"
    assert command() == 0
    assert lost not in capsys.readouterr().out
    shutil.copy("other/tokenizer.json", "data/bpe/tokenizer/tokenizer.json")
    assert command() == 0
    assert lost in capsys.readouterr().out
    assert not Path("out/tokenizer.json").exists()


def test_a_new_model_of_the_same_tokenizer_keeps_its_special_tokens(place):
    write_config("model", eos_token_id=[5, 0], bos_token_id=None)
    assert command() == 0
    written = json.loads(Path("out/config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"]) == ([5, 0], None)


@pytest.fixture(scope="module")
def stopping(tmp_path_factory):
    """A model in `out`, with a checkpoint, that has learned to end after `ab`."""
    folder = tmp_path_factory.mktemp("stopping")
    write_bpe(folder)
    strange = {"eos_token_id": 50256, "bos_token_id": 50256}
    write_config(folder / "model", **strange, tie_word_embeddings=False)
    write_jsonl(folder / "a.jsonl", ["ab"] * 600)
    run(folder / "a.jsonl", out=folder / "data", tokenizer=str(folder), eval_fraction=0.2)
    paths = {"model": "model", "train-file": "data/train-*.bin", "eval-file": "data/eval-*.bin"}
    paths |= {"out-dir": "out", "checkpoint-dir": "ckpt", "log-file": "log.json"}
    values = options(steps=60, learning_rate=1e-2, grad_accumulation=1, save_training_state=True)
    values |= {name: str(folder / path) for name, path in paths.items()}
    flags = [f"--{name}" if v is True else f"--{name}={v}" for name, v in values.items()]
    assert _run(["train", *flags]) == 0
    return folder


@pytest.mark.parametrize("model", ["out", "ckpt", "edited"])
def test_samples_stop(stopping, tmp_path, capsys, model):
    source = stopping / model
    if model == "edited":  # as exports were before: the tokenizer knows it all the same
        source = shutil.copytree(stopping / "out", tmp_path / "edited")
        config = json.loads((source / "config.json").read_text())
        config |= {"eos_token_id": None, "bos_token_id": 50256}
        (source / "config.json").write_text(json.dumps(config))
    args = "--prompt a --temperature 0 --max-new-tokens 9 --device cpu --model-dtype fp32".split()
    capsys.readouterr()
    assert _run(["sample", str(source), *args]) == 0
    assert capsys.readouterr().out == "ab\n"


def test_generate_of_transformers_stops(stopping):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(stopping / "out")
    net = transformers.AutoModelForCausalLM.from_pretrained(stopping / "out")
    prompt = tokenizer("a", return_tensors="pt")
    ids = net.generate(**prompt, do_sample=False, max_new_tokens=9)[0].tolist()
    assert tokenizer.decode(ids) == f"ab{END_OF_TEXT}"
    assert net.generation_config.eos_token_id == net.config.eos_token_id == 0


# ------------------------------------------------------------------------------------------------
# Exporting and sampling later, when the files may be others


def test_a_tokenizer_that_was_replaced_is_noticed(trained, capsys):
    """At the place that a checkpoint names, and beside an exported model."""
    source = Path(json.loads(Path("ckpt/step_00000002", MANIFEST).read_text())["tokenizer"])
    shutil.copytree("out", "export-before")
    shutil.copy("other/tokenizer.json", source / "tokenizer.json")
    shutil.copy("other/tokenizer.json", "export-before/tokenizer.json")
    names = [str(identity_of(HfTokenizer(Path(name)))) for name in ("bpe", "other")]
    capsys.readouterr()
    sample = ["--device=cpu", "--prompt=a", "--max-new-tokens=1"]
    for args in (
        ["export", "--checkpoint-dir=ckpt", "--out-dir=exported"],
        ["sample", "ckpt", *sample],
        ["sample", "export-before", *sample],
    ):
        assert _run(args) == 2
        err = capsys.readouterr().err
        assert f"was trained with the tokenizer {names[0]}, but '" in err and err.count("\n") == 1
        assert names[1].split()[1] in err.partition("now holds")[2]
    assert not Path("exported").exists()
    shutil.rmtree(source)
    assert _run(["export", "--checkpoint-dir=ckpt", "--out-dir=exported"]) == 0
    exported = Path("exported/tokenizer.json").read_bytes()  # the checkpoint has a copy
    assert exported == Path("out/tokenizer.json").read_bytes()


def test_ids_outside_the_vocabulary_are_not_exported(tmp_path):
    """The checkpoint does not say which tokenizer it had."""
    ByteTokenizer().save(tmp_path)
    check_recorded(tmp_path, None, 257, "checkpoint 'c'")
    check_recorded("bytes", None, 257, "checkpoint 'c'")
    check_recorded(tmp_path / "gone", None, 1, "checkpoint 'c'")
    for source in (tmp_path, "bytes"):
        with pytest.raises(DataError, match="has 257 ids, more than the vocabulary of checkpoint"):
            check_recorded(source, None, 256, "checkpoint 'c'")


def test_an_export_does_not_replace_another_runs(trained, capsys):
    assert command(out_dir="second", checkpoint_dir="c", save_training_state=True) == 0
    before = Path("second/llmq.json").read_text()
    capsys.readouterr()
    assert _run(["export", "--checkpoint-dir=ckpt", "--out-dir=second"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --out-dir: 'second' holds the model of run 'llmq' (")
    assert err.count("\n") == 1 and Path("second/llmq.json").read_text() == before
    Path("second/llmq.json").unlink()
    assert _run(["export", "--checkpoint-dir=c", "--out-dir=second"]) == 2
    assert "holds the model of no run of llmq's" in capsys.readouterr().err
    for _ in range(2):
        assert _run(["export", "--checkpoint-dir=ckpt", "--out-dir=out"]) == 0
