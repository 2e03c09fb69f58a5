"""Inputs that nobody means: each is one line and exit status 2, soon, and never a traceback."""

from __future__ import annotations

import copy
import itertools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import write_file
from llmq.checkpoint.checkpoint import CheckpointReader
from llmq.checkpoint.hf import INDEX_FILE, HfWeights
from llmq.checkpoint.manifest import MANIFEST, digest_of
from llmq.commands.cli import _run
from llmq.data.loader import DataLoader
from llmq.options.option_file import save_options
from llmq.options.options import OPTIONS
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.options.rules import RULES
from tests.runs import CONFIG, VOCAB, T, make_workplace, options, train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = make_workplace(tmp_path_factory.mktemp("odd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(steps=1, save_training_state=True) == 0
    return folder


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def refused(capsys, args):
    capsys.readouterr()
    assert _run(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 10**12}, {"vocab_size": 10**20}, {"num_hidden_layers": 10**9},
        {"intermediate_size": 10**18}, {"num_attention_heads": 10**12},
        {"max_position_embeddings": 10**30}, {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": float("nan")}, {"rms_norm_eps": -1.0}, {"rms_norm_eps": 10**400},
        {"initializer_range": -0.5}, {"initializer_range": float("nan")}, {"head_dim": 0},
        {"head_dim": -2}, {"head_dim": 100_000}, {"head_dim": 10**9},
        {"eos_token_id": -5}, {"eos_token_id": [256, -5]},
        {"eos_token_id": True}, {"architectures": [["x"]]}, {"architectures": "x"},
    ],
)  # fmt: skip
def test_models(change):
    name = next(iter(change)).removeprefix("rms_")
    with pytest.raises(LlmqError, match=name):
        ModelConfig.from_hf(CONFIG | change)


def test_a_plan_of_heads_that_only_the_cpu_computes(capsys):
    Path("wide").mkdir()
    args = ["plan", "--model=wide", "--from-scratch", "--seq-len=16", "--batch-size=1"]
    for width in (1000, 1 << 16):
        Path("wide/config.json").write_text(json.dumps(CONFIG | {"head_dim": width}))
        assert _run([*args, "--device=cpu"]) == 0
    assert f"the model's head_dim is {width}; on a GPU" in refused(capsys, [*args, "--card=h100"])


@pytest.mark.parametrize("name", ["batch_size", "grad_accumulation", "warmup", "ckpt_interval"])
def test_numbers_beyond_all_bounds(capsys, name):
    assert train(**{name: 10**20}) == 2
    assert "must be at most" in capsys.readouterr().err


def test_places_that_are_none(capsys):
    for flag in ("out-dir", "checkpoint-dir"):
        assert train(**{flag: "/proc/x"}) == 2
    assert refused(capsys, ["export", "--checkpoint-dir=ckpt", "--out-dir=/proc/x"])
    assert refused(capsys, ["tokenize", "data/eval.bin", "--tokenizer=bytes", "--out=/proc/x"])
    assert "empty name" in refused(capsys, ["tokenize", "", "--tokenizer=bytes", "--out=made"])


def test_files_of_options(capsys):
    many = ",".join(f'"key{i}": 1' for i in range(6_000))
    Path("many.json").write_text("{" + many + "}")
    assert _run(["train", "--config=many.json"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "unknown option key0" in lines[1] and lines[-1] == "  and 5950 more"
    Path("bomb.yaml").write_text("train-file: [&a [x, x], &b [*a, *a], [*b, *b]]\n")
    message = refused(capsys, ["train", "--config=bomb.yaml"])
    assert "line 1: write the values instead of *a" in message


ODD = [
    "auto",
    "",
    "0",
    "-1",
    "1e400",
    "nan",
    "x",
    "1:2",
    "8:0.5,16:0.5",
    "{}",
    "[",
    "a=",
    ",",
    "5-0",
]
ODD += [True, None, [], ["a"], {"a": 1}, 1.5, 10**30, float("inf"), b"x"]


@pytest.mark.parametrize(
    "more", [{}, {"lora-rank": 8}, {"model": "tiny", "from-scratch": True, "steps": 20}]
)
def test_values_of_options(more):
    """A value that is no value of its option is an error of one line."""
    model = preset("tiny")
    for option, value in itertools.product(OPTIONS.values(), ODD):
        try:
            config = make_config(more | {option.flags[0]: value}).validate_with(model)
            RULES.idle(config, model=model)
        except LlmqError as error:
            assert "\n" not in str(error)


VARIABLES = {
    "variables.yaml": "name: ${RUN}-1\nbatch-size: ${SIZE}\ntrain-file: ['${RUN}/a', '$b$${c}']\n",
    "variables.toml": 'name = "${RUN}-1"\nbatch-size = "${SIZE}"\n'
    'train-file = ["${RUN}/a", "$b$${c}"]',
    "variables.json": '{"name": "${RUN}-1", "batch-size": "${SIZE}", '
    '"train-file": ["${RUN}/a", "$b$${c}"]}',
}


@pytest.mark.parametrize("name", VARIABLES)
def test_environment_variables_in_files_of_options(capsys, monkeypatch, name):
    file = Path(name)
    file.write_text(VARIABLES[name])
    monkeypatch.setenv("RUN", "night")
    monkeypatch.setenv("SIZE", "8")
    config = make_config({}, file)
    assert (config.name, config.batch_size) == ("night-1", 8)
    assert config.train_file == ("night/a", "$b${c}")
    save_options(Path("again.yaml"), config)
    assert make_config({}, Path("again.yaml")).train_file == config.train_file
    monkeypatch.delenv("RUN")
    message = refused(capsys, ["train", f"--config={name}"])
    assert message == f"error: --config: {name}: name: the environment variable RUN is not set\n"
    for wrong in ("${", "${}", "${RUN:-x}", "${RUN"):
        Path("wrong.json").write_text(json.dumps({"name": wrong}))
        message = refused(capsys, ["train", "--config=wrong.json"])
        assert f"wrong.json: name: expected ${{NAME}} in '{wrong}', or $${{ for a plain" in message


@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])
def test_what_never_ends(capsys, path):
    if path == "pipe" and not os.path.exists(path):
        os.mkfifo(path)
    for args in (["plot", path], ["show", path], ["check", path], ["train", f"--config={path}"]):
        assert "is a pipe or a device: give a file" in refused(capsys, args)
    assert train(**{"train-file": path}) == 2


def test_devices_are_not_replaced(capsys):
    """The super-user could put a file in the place of /dev/zero."""
    os.mkfifo("made.yaml")
    assert train(steps=1, **{"save-config": "made.yaml"}) == 2
    assert "'made.yaml' is a pipe or a device: give a file" in capsys.readouterr().err
    assert stat.S_ISFIFO(os.lstat("made.yaml").st_mode)
    with pytest.raises(ConfigError, match=r"^'made\.yaml' is a pipe or a device: give a file$"):
        write_file(Path("made.yaml"), "text")
    assert stat.S_ISFIFO(os.lstat("made.yaml").st_mode)


def test_pipes_in_the_place_of_a_model_s_files(capsys):
    for name in ("config.json", "tokenizer.json", "chat.jinja"):
        Path(name).unlink(missing_ok=True)
        os.mkfifo(name)
    more = ["--tokenizer=bytes", "--out=made", "--chat-template=chat.jinja"]
    Path("talk.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    for args in (
        ["plan", "--model=."],
        ["tokenize", "data/eval.bin", "--tokenizer=.", "--out=made"],
        ["tokenize", "talk.jsonl", *more],
    ):
        assert "is a pipe or a device" in refused(capsys, args)


def test_names_that_leave_their_directory(tmp_path):
    index = {"weight_map": {"model.embed_tokens.weight": "../other/model.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(LlmqError, match="which is not in its directory"):
        HfWeights(tmp_path)


def wrong_values(document):
    """The document, each time with another one of its values of another kind, or without it."""
    for path in list(paths(document)):
        for value in (None, -1, "x", [], {}, [[1]], ...):
            changed = copy.deepcopy(document)
            inside = changed
            for key in path[:-1]:
                inside = inside[key]
            if value is ...:
                del inside[path[-1]]
            else:
                inside[path[-1]] = value
            yield path, changed


def paths(value, path=()):
    if path:
        yield path
    if path[:1] in (("sha256",), ("options",)) or path[:2] == ("run", "state"):
        return
    count = len(value) if isinstance(value, list) else 0
    for key in value if isinstance(value, dict) else range(count):
        yield from paths(value[key], (*path, key))


def test_manifests_of_the_wrong_shape_whose_checksum_agrees(place, tmp_path):
    source = place / "ckpt" / "step_00000001"
    for file in source.iterdir():
        os.symlink(file, tmp_path / file.name)
    document = json.loads((source / MANIFEST).read_text())
    loader = DataLoader("data/train-*.bin", seq_len=T, micro_batch=2, seed=1, vocab_size=VOCAB)
    refusals = 0
    with loader:
        for path, changed in wrong_values(document):
            changed["sha256"] = digest_of(changed)
            (tmp_path / MANIFEST).unlink()
            (tmp_path / MANIFEST).write_text(json.dumps(changed))
            try:
                with CheckpointReader(tmp_path) as reader:
                    loader.set_state(reader.manifest.loader or loader.state())
            except LlmqError as error:
                assert "\n" not in str(error), path
                refusals += 1
    assert refusals > 100


def test_closed_streams(place):
    """`>&-` leaves them so: no file may get the number of a stream that libraries write to."""
    flags = [f"--{name}={value}" for name, value in options(steps=1).items() if value not in
             (True, False)]  # fmt: skip
    flags += ["--from-scratch", "--overwrite"]
    command = [sys.executable, "-m", "llmq", "train", *flags]
    root = str(Path(__file__).parents[2])
    shell = ["sh", "-c", '"$@" >&- 2>&-', "x", *command]
    done = subprocess.run(shell, cwd=place, env=os.environ | {"PYTHONPATH": root})
    assert done.returncode == 0
    assert any(r["log"] == "step" for r in json.loads((place / "log.json").read_text()))
