"""--download: what is fetched from the hub, what is not, and what goes on after an interruption.

The hub is a server on this machine.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32
from llmq.base.errors import ConfigError
from llmq.checkpoint.hf import HfWeights, export_model
from llmq.checkpoint.hub import find_tokenizer, upload
from llmq.commands.cli import _run
from llmq.data.identity import TokenizerId
from llmq.options.options_io import make_config
from llmq.options.presets import find_directory
from llmq.run.model_of_run import at_commit, model_of_run
from llmq.state.params import weight_table
from llmq.text.tokenizer import load_tokenizer
from llmq.text.tokenizer_id import identity_of
from tests.hub import SHA, serving
from tests.runs import CONFIG, make_workplace, train
from tests.text_data import documents, write_bpe, write_jsonl

ID = "someone/small"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a model, its weights in two files, and much that nobody needs; an empty cache."""
    pytest.importorskip("huggingface_hub")
    for name in ("CI", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the library tries again
    folder = tmp_path / "hub" / ID
    rng = np.random.default_rng(0)
    export_model(
        folder,
        ModelConfig.from_hf(CONFIG),
        lambda param: rng.normal(0, 0.02, param.shape).astype(np.float32),
        F32,
        max_shard_bytes=60_000,
    )
    write_bpe(folder)
    others = ("README.md", "onnx/model.onnx", "consolidated.safetensors", "tokenization_exact.py")
    for name in ("pytorch_model.bin", *others):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    with serving(tmp_path / "hub") as (found, address):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield found


def of(**given):
    given = {name.replace("_", "-"): value for name, value in given.items()}
    return make_config({"model": ID} | given)


def names(hub):
    return [name for name, _ in hub.fetched]


WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
DESCRIPTION = ["config.json", "generation_config.json"]
INDEX = "model.safetensors.index.json"


def test_what_is_needed_is_fetched_when_asked_for(hub, capsys):
    with pytest.raises(ConfigError, match=rf"^--model: '{ID}' is not .* add --download to fetch"):
        model_of_run(of())
    assert hub.fetched == []
    model, directory = model_of_run(of(download=True))
    assert names(hub) == [*DESCRIPTION, INDEX, "tokenizer.json", *WEIGHTS]
    said = capsys.readouterr().err
    assert f"Downloading {ID}: 4 files, 0.0 MB, of commit {SHA[:12]}\n" in said
    assert "2 files of weights, 0.1 MB" in said
    with HfWeights(directory) as weights:
        weights.check(weight_table(model))
    assert model_of_run(of()) == (model, directory)
    assert model_of_run(of(download=True)) == (model, directory)
    assert f"--download has no effect: {ID} is in the cache" in capsys.readouterr().err
    assert len(hub.fetched) == 6


def test_a_plan_and_a_run_from_scratch_need_no_weights(hub):
    model, directory = model_of_run(of(download=True), weights=False)
    assert names(hub) == [*DESCRIPTION, "tokenizer.json"]
    assert model_of_run(of(from_scratch=True)) == (model, directory)
    offer = rf"^--model: the weights of {ID} is not on this machine .* add --download"
    with pytest.raises(ConfigError, match=offer):
        model_of_run(of())
    assert model_of_run(of(download=True)) == (model, directory)  # the rest
    assert set(names(hub)) == {*DESCRIPTION, "tokenizer.json", INDEX, *WEIGHTS}
    (directory / WEIGHTS[1]).unlink()
    with pytest.raises(ConfigError, match=offer):
        model_of_run(of())


def test_a_download_is_of_one_commit_which_a_run_keeps(hub):
    _, directory = model_of_run(of(download=True))
    assert directory.name == SHA and hub.asked[-1] == "main"
    assert set(hub.asked[:-1]) == {SHA}, "what a branch is may change between two files"
    config = at_commit(of(), directory)
    hub.sha = "f" * 40
    assert model_of_run(config)[1] == model_of_run(of(revision="main"))[1] == directory
    with pytest.raises(ConfigError, match="add --download to fetch it from the hub"):
        model_of_run(of(revision="v2"))
    _, other = model_of_run(of(revision="v2", download=True))
    assert other.name == hub.sha and at_commit(of(revision="v2"), other).revision == hub.sha
    assert find_tokenizer(f"{ID}@v2", False) == str(other)
    assert model_of_run(of())[1] == directory, "its branch is where it was"
    for revision in ("../../main", "v3"):
        assert find_directory(f"{ID}@{revision}") is None
    with pytest.raises(ConfigError, match="--revision: --model tiny is no repository of the hub"):
        model_of_run(of(revision="v2", model="tiny", from_scratch=True))


def test_a_download_goes_on_where_it_stopped(hub, monkeypatch):
    """A download goes on within a file after a network failure, and with missing files."""
    content = (hub.folder / ID / WEIGHTS[0]).read_bytes()
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", len(content) // 8)
    hub.drops[WEIGHTS[0]] = len(content) // 2
    hub.failing = {WEIGHTS[1]}
    with pytest.raises(ConfigError, match=rf"^--download: {ID}: .* what is complete stays"):
        model_of_run(of(download=True))
    assert hub.fetched[4:] == [(WEIGHTS[0], 0), (WEIGHTS[0], len(content) // 2), (WEIGHTS[1], 0)]
    with pytest.raises(ConfigError, match="the weights of"):
        model_of_run(of())
    hub.failing = set()
    hub.fetched.clear()
    _, directory = model_of_run(of(download=True))
    assert hub.fetched == [(WEIGHTS[1], 0)]
    for name in WEIGHTS:
        assert (directory / name).read_bytes() == (hub.folder / ID / name).read_bytes()


def test_a_model_is_trained_from_the_hub(hub, tmp_path, monkeypatch, capsys):
    place = tmp_path / "place"
    place.mkdir()
    make_workplace(place)
    (hub.folder / ID / "tokenizer.json").unlink()  # that the export is compared with, slowly
    monkeypatch.chdir(place)
    options = {"model": ID, "from_scratch": None, "steps": 1, "eval_file": "none"}
    options["from-scratch"] = options.pop("from_scratch")
    assert train(**options) == 2
    assert "add --download to fetch it from the hub" in capsys.readouterr().err
    assert not Path("out").exists() and not Path("log.json").exists()
    options |= {"download": "", "save_training_state": True}
    assert train(**options) == 0, capsys.readouterr().err
    assert json.loads(Path("out/config.json").read_text())["hidden_size"] == CONFIG["hidden_size"]
    begun = {"name": ID, "revision": SHA}
    assert json.loads(Path("out/llmq.json").read_text())["hub"] == begun
    assert _run(["export", "--checkpoint-dir=ckpt", "--out-dir=again"]) == 0
    assert json.loads(Path("again/llmq.json").read_text())["hub"] == begun
    capsys.readouterr()
    assert _run(["train", "--continue", "--checkpoint-dir=ckpt", "--steps=2"]) == 0
    assert "--download" not in capsys.readouterr().err, "it is of the command that fetched"


@pytest.mark.parametrize(
    ("variable", "said"),
    [("CI", "--download: not in CI"), ("HF_HUB_OFFLINE", "--download: HF_HUB_OFFLINE is set")],
)
def test_where_nothing_is_downloaded(hub, monkeypatch, variable, said):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ConfigError, match=said):
        model_of_run(of(download=True))
    assert hub.fetched == []


def test_what_cannot_be_fetched(hub, monkeypatch, capsys):
    for given, said in (
        ({"model": "someone/else"}, "--download: the hub has no model someone/else"),
        ({"model": "someone/bare"}, "--model: someone/bare has no safetensors weights on the hub"),
        ({"model": "someone/empty"}, "--model: someone/empty has no config.json on the hub"),
    ):
        (hub.folder / "someone/bare").mkdir(exist_ok=True)
        shutil.copy(hub.folder / ID / "config.json", hub.folder / "someone/bare/config.json")
        (hub.folder / "someone/bare/pytorch_model.bin").touch()
        (hub.folder / "someone/empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=said):
            model_of_run(of(download=True, **given))
    hub.gated = True
    with pytest.raises(ConfigError, match=rf"{ID} is gated: accept its terms .* `hf auth login`"):
        model_of_run(of(download=True))
    assert hub.fetched == []
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(ConfigError, match=rf"^--download: {ID}: .* what is complete stays"):
        model_of_run(of(download=True))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"^--download needs huggingface_hub: pip install hugg"):
        model_of_run(of(download=True))
    capsys.readouterr()
    model_of_run(of(model="tiny", from_scratch=True, download=True))
    assert "--download has no effect: --model tiny is a preset" in capsys.readouterr().err


def test_a_tokenizer_of_the_hub(hub, tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", documents(5))
    start = ["tokenize", str(path), "--tokenizer", ID, "--out", str(tmp_path / "out")]
    assert _run(start) == 2
    assert f"--tokenizer: {ID} is not on this machine" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and hub.fetched == []
    assert _run([*start, "--download"]) == 0, capsys.readouterr().err
    assert names(hub) == ["tokenizer.json"]
    assert _run([*start, "--overwrite"]) == 0  # from the cache
    manifest = json.loads((tmp_path / "out" / "tokenize.json").read_text())
    assert manifest["tokenizer"]["name"] == ID
    assert identity_of(load_tokenizer(ID)) == TokenizerId.from_record(manifest["tokenizer"])
    assert find_tokenizer(ID, False) == str(find_directory(ID))
    capsys.readouterr()
    for name in ("bytes", str(tmp_path)):
        assert find_tokenizer(name, True) == name
        assert "--download has no effect: --tokenizer" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--tokenizer: someone/bare has no tokenizer on the hub"):
        (hub.folder / "someone/bare").mkdir()
        find_tokenizer("someone/bare", True)


def test_an_upload_is_of_exactly_its_files(hub, tmp_path, monkeypatch):
    """Names are no patterns: files beside them that a pattern would match stay here."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    sent = {}

    class Api:
        def __init__(self, **where):
            pass

        def create_repo(self, name, **how):
            pass

        def upload_folder(self, *, repo_id, folder_path, allow_patterns):
            every = sorted(p for p in Path(folder_path).rglob("*") if p.is_file())
            names = (path.relative_to(folder_path).as_posix() for path in every)
            sent[repo_id] = [*filter_repo_objects(names, allow_patterns=allow_patterns)]

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    folder = tmp_path / "out"
    for name in ("mine[v1].gguf", "minev.gguf", "*.gguf", "README.md", "sub/README.md"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).touch()
    for path, files in (
        (folder / "mine[v1].gguf", ["mine[v1].gguf"]),
        (folder / "*.gguf", ["*.gguf"]),
        (folder, ["README.md"]),
    ):
        upload("o/n", path, files)
        assert sent["o/n"] == files
