"""Files of others: nothing in them acts, and no bad one stops more than itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.errors import DataError
from llmq.checkpoint.hf_export import export_model
from llmq.data.tokenizer import EXACT_CODE, EXACT_MODULE, HfTokenizer
from tests.runs import CONFIG
from tests.text_data import write_bpe

FOREIGN_MAP = {"AutoTokenizer": [None, "tokenization_exact.Theirs"]}


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer of somebody else."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    write_bpe(folder)
    return folder


def export(folder: Path, tokenizer: HfTokenizer | Path) -> Path:
    model = ModelConfig.from_hf(CONFIG)
    export_model(folder, model, lambda param: np.zeros(param.shape, np.float32), F32, tokenizer)
    return folder


# Code and links


@pytest.mark.parametrize("whole_folder", [True, False])
def test_code_of_others_is_left_behind(tokenizer, tmp_path, capsys, whole_folder):
    for name in (EXACT_MODULE, "modeling_theirs.py"):
        (tokenizer / name).write_text("import os; os.abort()\n")
    config = {"auto_map": FOREIGN_MAP, "tokenizer_class": "Qwen2Tokenizer"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    out = export(tmp_path / "out", tokenizer if whole_folder else HfTokenizer(tokenizer))
    said = capsys.readouterr().err
    assert said.startswith("warning: the code that ") and "tokenization_exact.Theirs" in said
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert "Theirs" not in str(written)
    modules = {path.name: path.read_text() for path in out.glob("*.py")}
    assert modules in ({}, {EXACT_MODULE: EXACT_CODE})
    again = export(tmp_path / "again", out)  # our own is no code of others
    assert capsys.readouterr().err == ""
    assert json.loads((again / "tokenizer_config.json").read_text()) == written


def test_links_that_leave_the_folder_are_not_followed(tokenizer, tmp_path, capsys):
    (tmp_path / "secret").write_text("secret")
    (tokenizer / "tokenizer.model").symlink_to("../secret")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer / "added_tokens.json").symlink_to("own.json")
    (tokenizer / "own.json").write_text("{}")
    out = export(tmp_path / "out", HfTokenizer(tokenizer))
    assert "tokenizer.model' is a link that leaves its folder" in capsys.readouterr().err
    assert not os.path.lexists(out / "tokenizer.model")
    assert (out / "added_tokens.json").read_text() == "{}"
    (tokenizer / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (tokenizer / "tokenizer.json").symlink_to("../tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json. is a link that leaves its folder"):
        HfTokenizer(tokenizer)


def test_links_of_the_hubs_cache_are_followed(tokenizer, tmp_path):
    """In which every file of a snapshot is a link to its content."""
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").mkdir()
    for path in tokenizer.iterdir():
        path.rename(tmp_path / "models--a--b/blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    out = export(tmp_path / "out", HfTokenizer(snapshot))
    assert (out / "tokenizer.json").is_file() and not (out / "tokenizer.json").is_symlink()
