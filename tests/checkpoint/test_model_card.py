"""README.md of an export, and --push, which sends files to the hub."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import yaml

from llmq.base.errors import LlmqError
from llmq.base.run_id import RunId
from llmq.checkpoint.exports import export
from llmq.data.identity import TokenizerId
from llmq.data.tokens import TokenWriter
from tests.models import VOCAB, exported, hf_model, random_batch, trainer_for


def write_ids(path: Path) -> None:
    with TokenWriter(path, VOCAB) as writer:
        writer.write(np.arange(1000) % VOCAB)


def head(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The checkpoint of a run's first step, and its log, which goes on to the second one."""
    folder = tmp_path_factory.mktemp("run")
    records = [
        {"log": "step", "step": 0, "loss": 9.0},
        {"log": "eval", "step": 1, "loss": 4.25},
        {"log": "step", "step": 1, "loss": 3.5},
        {"log": "step", "step": 2, "loss": 2.5},
    ]
    records = [{"time": "2026-11-26 00:00:00.000000000"} | record for record in records]
    (folder / "log.json").write_text(json.dumps(records))
    (folder / "somebody").mkdir()
    write_ids(folder / "somebody" / "books-0.bin")
    options = {"train_file": f"{folder}/somebody/books*.bin", "log_file": f"{folder}/log.json"}
    with trainer_for(exported("qwen3"), name="reader", learning_rate=3e-4, **options) as trainer:
        trainer.step([random_batch(np.random.default_rng(0))])
        return trainer.save(folder / "c")


def test_a_card_tells_of_data_losses_and_options(run, tmp_path):
    assert "README.md" in export(run, tmp_path / "m", licence="mit")
    card = (tmp_path / "m" / "README.md").read_text()
    assert head(card) == {"license": "mit", "library_name": "transformers", "tags": ["llmq"]}
    for said in (
        "# reader\n",
        f"Qwen3 of {hf_model('qwen3').num_parameters():,} parameters: 2 layers",
        r"| training data | books\*.bin |",
        "| step | 1 |",
        "| training loss | 3.5000 |",
        "| validation loss | 4.2500 |",
        "llmq plan --config FILE",
    ):
        assert said in card, card
    options = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert options["learning-rate"] == 3e-4 and options["batch-size"] == 2
    assert "somebody" not in card and str(run.parent) not in card  # nobody else has these paths


def test_names_of_others_are_text_in_a_card_and_prompts_are_left_out(tmp_path):
    name, private = "a|b<img src=x>[c](http:d)`", "my secret"
    options = {"name": name, "sample_prompt": [private, "```\n# Title\n"], "wandb": private}
    write_ids(tmp_path / "t|`u.bin")
    options |= {
        "train_file": f"{tmp_path}/t|`u.bin",
        "eval_task": [f"{private}.jsonl"],
        "tensorboard": private,
    }
    with trainer_for(exported("qwen3"), **options) as trainer:
        trainer.tokenizer_id = trainer.tokenizer_id or TokenizerId("tok|<b>", "f" * 64)
        trainer.run = RunId.new(name)
        trainer.step([random_batch(np.random.default_rng(0))])
        export(trainer.save(tmp_path / "c"), tmp_path / "m")
    card = (tmp_path / "m" / "README.md").read_text()
    escaped = r"a\|b\<img src=x\>\[c\](http\:d)\`"
    assert f"# {escaped}\n" in card and r"| training data | t\|\`u.bin |" in card
    text = re.sub(r"(`{3,})yaml\n.*?\1", "", card, flags=re.DOTALL)
    assert "<" not in text.replace(r"\<", "") and "[" not in text.replace(r"\[", "")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}
    assert private not in card and "Title" not in card


def test_a_card_of_gguf_files_has_the_licence_of_the_model(tmp_path):
    pytest.importorskip("gguf")
    shutil.copytree(exported("qwen2"), tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: other\nlicense_name: x\n---\nHi\n")
    export(tmp_path / "base", tmp_path / "m", to="gguf", dtype="q8_0")
    card = (tmp_path / "m" / "README.md").read_text()
    assert head(card)["license"] == "other" and head(card)["license_name"] == "x"
    assert (head(card)["library_name"], "; gguf, q8_0" in card) == ("gguf", True)
    assert not (tmp_path / "m.gguf").exists()


def test_the_card_of_somebody_else_stays(run, tmp_path, capsys):
    mine = tmp_path / "m" / "README.md"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert "README.md" not in export(run, tmp_path / "m")
    assert mine.read_text() == "mine"
    assert "README.md' stays: llmq has not written it" in capsys.readouterr().err
    mine.unlink()
    export(run, tmp_path / "m")
    export(run, tmp_path / "m", licence="mit")  # its own one is replaced
    assert head(mine.read_text())["license"] == "mit"


# ------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Calls of the library, which sends nothing."""
    calls = []

    def api(endpoint=None):
        return SimpleNamespace(
            create_repo=lambda name, **how: calls.append(("create", name, how)),
            upload_folder=lambda **how: calls.append(("upload", how)),
        )

    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    for name in ("CI", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_nothing_is_sent_unless_told_so(hub, run, tmp_path):
    export(run, tmp_path / "m")
    assert hub == []


def test_push_sends_what_was_written(hub, run, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "secret.txt").write_text("mine")
    files = export(run, tmp_path / "m", push="me/reader")
    (_, name, how), (_, sent) = hub
    assert (name, how) == ("me/reader", {"private": True, "exist_ok": True})
    assert (sent["repo_id"], sent["allow_patterns"]) == ("me/reader", files)
    assert Path(sent["folder_path"]) == tmp_path / "m" and "secret.txt" not in files


@pytest.mark.parametrize("name", ["reader", "me/reader@main", "a/b/c"])
def test_what_is_no_repository_is_refused_at_once(hub, run, tmp_path, name):
    with pytest.raises(LlmqError, match=r"--push: .* is no repository of the hub: give OWNER/NAME"):
        export(run, tmp_path / "m", push=name)
    assert hub == [] and not (tmp_path / "m").exists()


def test_a_push_that_fails_leaves_the_export(hub, run, tmp_path, monkeypatch):
    def refuse(endpoint=None):
        raise OSError("no way\nthere")

    monkeypatch.setattr(huggingface_hub, "HfApi", refuse)
    with pytest.raises(LlmqError, match="--push: me/reader: no way there"):
        export(run, tmp_path / "m", push="me/reader")
    assert (tmp_path / "m" / "config.json").is_file()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LlmqError, match="--push: HF_HUB_OFFLINE is set"):
        export(run, tmp_path / "n", push="me/reader")
    assert not (tmp_path / "n").exists()
