"""Own sizes of a new model: what follows from them, what contradicts, and whole runs with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmq.arch.experts import Experts
from llmq.base.errors import ConfigError, DataError, LlmqError
from llmq.bench.measure import open_trainer
from llmq.bench.sweep_file import flag_of, read_runs
from llmq.commands.cli import _run
from llmq.data.tokens import TokenWriter
from llmq.options.option_file import command_line
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.memory import needed_bytes
from llmq.run.model_of_run import model_of_run, tokenizer_source, vocabulary_line
from llmq.run.trainer import Trainer
from llmq.state.params import parameter_count
from llmq.text.tokenizer import ByteTokenizer
from tests.runs import options, records, train

# Preset, options, and what differs from the preset.
RESIZED = {
    "head_size_follows": (
        "tiny",
        {"hidden-size": 192, "num-heads": 6},
        {"hidden_size": 192, "num_heads": 6, "head_dim": 32},
    ),
    "own_head_size": ("tiny", {"head-dim": 16}, {"head_dim": 16}),
    "head_size_of_the_architecture_stays": (
        "qwen3-0.6b",
        {"hidden-size": 512, "num-attention-heads": 4, "num-key-value-heads": 2},
        {"hidden_size": 512, "num_heads": 4, "num_kv_heads": 2},
    ),
    "all_heads_have_keys": (
        "llama-2-7b",
        {"num-heads": 16},
        {"num_heads": 16, "num_kv_heads": 16, "head_dim": 256},
    ),
    "width_of_the_mlp_follows": (
        "gpt2",
        {"hidden-size": 384, "num-heads": 6},
        {
            "hidden_size": 384,
            "num_heads": 6,
            "num_kv_heads": 6,
            "intermediate_size": 1536,
        },
    ),
    "experts_behind_first_layers": (
        "tiny-deepseek-v3",
        {"num-layers": 9, "expert-size": 32, "num-heads": 8},
        {
            "num_layers": 9,
            "num_heads": 8,
            "num_kv_heads": 8,
            "experts": Experts(
                count=8,
                active=2,
                size=32,
                shared_size=32,
                scale=2.5,
                renormalize=True,
                layers=(False, *(True,) * 8),
            ),
        },
    ),
    "experts": (
        "tiny-qwen3-moe",
        {"num-experts": 16, "num-experts-per-tok": 4, "expert-size": 32, "num-layers": 2},
        {
            "num_layers": 2,
            "experts": Experts(count=16, active=4, size=32, renormalize=True, aux_loss=0.001),
        },
    ),
    "windows_of_more_layers": (
        "tiny-gemma3",
        {"num-layers": 8},
        {"num_layers": 8, "windowed_layers": (True,) * 5 + (False,) + (True,) * 2},
    ),
    "windows_of_fewer_layers": (
        "tiny-gemma3",
        {"num-layers": 3, "max-positions": 256},
        {
            "num_layers": 3,
            "windowed_layers": (True,) * 3,
            "max_positions": 256,
            "sliding_window": None,
        },
    ),
    "the_rest": (
        "llama-3-1b",
        {
            "vocab-size": "0x400",
            "intermediate-size": 80,
            "num-hidden-layers": 3,
            "max-position-embeddings": 64,
            "rope-theta": 100,
            "tie-word-embeddings": False,
        },
        {
            "vocab_size": 1024,
            "intermediate_size": 80,
            "num_layers": 3,
            "max_positions": 64,
            "rope_theta": 100.0,
            "tied_embeddings": False,
            # Its own are beyond the vocabulary.
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
}


def of_options(model, **given):
    return make_config({"model": model, "from-scratch": True, **given})


@pytest.mark.parametrize(("name", "given", "differs"), RESIZED.values(), ids=RESIZED)
def test_what_is_not_given_stays_or_follows(name, given, differs):
    model, directory = model_of_run(of_options(name, **given))
    assert (model, directory) == (replace(preset(name), **differs), None)


def test_a_window_is_not_longer_than_the_positions(tmp_path):
    hf = replace(preset("tiny-mistral"), sliding_window=512).to_hf()
    (tmp_path / "config.json").write_text(json.dumps(hf))
    windows = [
        model_of_run(of_options(str(tmp_path), **{"max-positions": n}))[0].sliding_window
        for n in (1024, 513, 512, 64)
    ]
    assert windows == [512, 512, None, None]


CONTRADICTIONS = {
    "no_experts": ("tiny", {"num-experts": 8}, r"^--num-experts: this model has no experts"),
    "experts_as_wide_as_mlps": (
        "tiny-olmoe",
        {"expert-size": 32},
        r"^--expert-size: these experts are as wide as --intermediate-size says",
    ),
    "more_than_there_are": (
        "tiny-olmoe",
        {"active-experts": 9},
        r"^--active-experts: a token must meet 1 to 32 of at most 512 experts, got 9 of 8",
    ),
    "heads": ("tiny", {"num-heads": 5}, r"^--num-heads: 5 heads do not divide .* 128: choose"),
    "width": ("gpt2", {"hidden-size": 100}, r"^--hidden-size: 12 heads do not divide .* 100"),
    "keys_of_the_preset": (
        "qwen2.5-0.5b",
        {"num-heads": 7},
        r"^--num-heads: 7 heads are no multiple of the 2 key .*: give --num-kv-heads too",
    ),
    "keys": (
        "tiny",
        {"num-heads": 4, "num-kv-heads": 3},
        r"^--num-kv-heads: 3 does not divide 4 heads",
    ),
    "odd_heads": ("tiny", {"head-dim": 33}, r"^--head-dim: RoPE needs an even number, got 33"),
    "no_keys_of_their_own": (
        "tiny-gpt2",
        {"num-kv-heads": 1},
        r"^--num-kv-heads: GPT2LMHeadModel needs 2, got 1",
    ),
    "learned_positions": ("gpt2", {"rope-theta": 5}, r"^--rope-theta: has no effect.* learned"),
    "theta": ("tiny", {"rope-theta": 0}, r"^--rope-theta: must be positive"),
    "none": ("tiny", {"num-layers": 0}, r"^--num-layers: must be at least 1"),
    "no_tokens": ("tiny", {"vocab-size": 0}, r"^--vocab-size: must be at least 1"),
    "no_number": ("tiny", {"vocab-size": "many"}, r"^--vocab-size: expected a number .* or auto"),
}


@pytest.mark.parametrize(("name", "given", "match"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_name_the_flag(name, given, match):
    with pytest.raises(ConfigError, match=match):
        model_of_run(of_options(name, **given))


@pytest.mark.parametrize("given", [{"num-layers": 2}, {"tie-embeddings": False}])
def test_weights_have_their_own_sizes(given):
    with pytest.raises(ConfigError, match=f"^--{next(iter(given))}: needs --from-scratch"):
        make_config({"model": "anything", **given})


def test_a_command_line_says_them_again(capsys):
    config = of_options("tiny", **{"vocab-size": "auto", "rope-theta": 5, "tie-embeddings": False})
    flags = ["--vocab-size=auto", "--no-tie-embeddings", "--rope-theta=5.0"]
    assert command_line(config)[-3:] == flags
    fit = "plan --model tiny --from-scratch --num-layers 3 --fit --card 4090"
    assert _run([*fit.split(), "--host-memory", "8GiB"]) == 0
    assert "--num-layers=3" in capsys.readouterr().out


def test_a_tokenizer_of_another_vocabulary_is_not_exported(tmp_path):
    ByteTokenizer().save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(preset("tiny").to_hf()))
    file = {"train-file": str(tmp_path / "of another program.bin")}
    for given, found in (({}, str(tmp_path)), ({"vocab-size": 999}, None)):
        config = of_options(str(tmp_path), **file, **given)
        assert tokenizer_source(config, *model_of_run(config), None) == found


# ------------------------------------------------------------------------------------------------
# The vocabulary of the data

VOCAB = 300


def write_data(folder, vocab_size=VOCAB, name="train"):
    folder.mkdir(exist_ok=True)
    ids = np.random.default_rng(0).integers(0, vocab_size, 400)
    with TokenWriter(folder / f"{name}.bin", vocab_size) as writer:
        writer.write(ids)
    return str(folder / f"{name}.bin")


def test_auto_takes_the_vocabulary_of_the_data(tmp_path):
    data = {"train-file": write_data(tmp_path / "data"), "vocab-size": "auto"}
    assert model_of_run(of_options("tiny", **data))[0] == replace(preset("tiny"), vocab_size=VOCAB)
    more = write_data(tmp_path / "data", VOCAB + 50, "more")
    named = {"eval-file": [data["train-file"], f"more={more}"]}
    with pytest.raises(DataError, match=r"more.bin' has 350: use one tokenizer for all files"):
        model_of_run(of_options("tiny", **data, **named))
    missing = data | {"train-file": str(tmp_path / "none.bin")}
    with pytest.raises(DataError, match=r"^--vocab-size: auto reads --train-file: no token file"):
        model_of_run(of_options("tiny", **missing))
    header = bytearray(Path(data["train-file"]).read_bytes())
    header[8] = 1  # the version that has no vocabulary
    Path(data["train-file"]).write_bytes(header)
    with pytest.raises(ConfigError, match=r"^--vocab-size: auto: .* give the number"):
        model_of_run(of_options("tiny", **data))


def test_auto_is_proposed(tmp_path):
    def line(model, trains=True, **given):
        config = of_options(model, **{"train-file": file} | given)
        return vocabulary_line(config, model_of_run(config)[0], trains=trains)

    file = write_data(tmp_path / "data")
    small = "^--model: tiny has a vocabulary of 257, less than the 300 tokens .* auto, or 300$"
    with pytest.raises(ConfigError, match=small):
        line("tiny")
    assert line("tiny", trains=False).startswith("--model: tiny has a vocabulary of 257, less")
    with pytest.raises(ConfigError, match=r"^--vocab-size: 299 is less than the 300 tokens"):
        line("tiny", **{"vocab-size": 299})
    large = line("gpt2")  # (50257 - 300) * 768
    assert "gpt2 has a vocabulary of 50257, far more than the 300 tokens" in large
    assert "--vocab-size auto saves 38.4M parameters" in large
    assert "saves 76.7M parameters" in line("gpt2", **{"tie-embeddings": False})
    for given in ({"vocab-size": "auto"}, {"vocab-size": 300}, {"vocab-size": 50257}):
        assert line("gpt2", **given) is None
    assert line("gpt2", **{"train-file": "not there"}) is None


# ------------------------------------------------------------------------------------------------
# Whole runs

OWN = {
    "hidden_size": 48,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 16,
    "intermediate_size": 40,
    "num_layers": 2,
    "max_positions": 64,
    "tie_embeddings": False,
    "vocab_size": "auto",
}
IN_CONFIG_JSON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "architectures": ["Qwen3ForCausalLM"],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("train", "eval"):
        write_data(tmp_path / "data", name=name)
    return {"model": "tiny-qwen3", "train_file": "data/train.bin", **OWN}


def test_a_run_of_own_sizes_is_exported_and_continued(place, capsys):
    transformers = pytest.importorskip("transformers")
    given = place | {"ckpt_interval": 1, "save_training_state": True}
    assert train(steps=2, **given) == 0, capsys.readouterr().err
    rows = {r["name"]: r["value"] for r in records("option")}
    assert (rows["vocab-size"], rows["hidden-size"], rows["ffn-size"]) == (VOCAB, 48, 40)
    config = json.loads(Path("out/config.json").read_text())
    assert {name: config[name] for name in IN_CONFIG_JSON} == IN_CONFIG_JSON
    loaded = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert loaded.lm_head.weight.shape == (VOCAB, 48)
    assert loaded.model.layers[1].self_attn.q_norm.weight.shape == (16,)

    assert train(steps=3, **given, **{"continue": ""}) == 0, capsys.readouterr().err
    assert train(steps=3, **given | {"num_layers": 1}, **{"continue": ""}) == 2
    assert "is of another model" in capsys.readouterr().err
    assert train(steps=3, **given | {"rope_theta": 7}, **{"continue": ""}) == 2
    assert "of another model: rope_theta was 10000.0, now it is 7.0" in capsys.readouterr().err


def test_the_other_commands_know_the_sizes(place, capsys):
    given = {name.replace("_", "-"): value for name, value in place.items()}
    flags = [flag_of(name, value) for name, value in given.items()]
    flags += ["--from-scratch", "--device=cpu", "--model-dtype=fp32"]
    flags += ["--batch-size=2", "--seq-len=16", "--grad-accumulation=2"]
    assert _run(["plan", "--json", *flags]) == 0
    planned = json.loads(capsys.readouterr().out)
    with Trainer(**options_of_python(place)) as trainer:
        assert planned["parameters"] == parameter_count(trainer.model)
        assert planned["needed_bytes"] == needed_bytes(trainer.plan, trainer.dev.spec)
        assert trainer.model.vocab_size == VOCAB
    assert _run(["verify", "--verify-steps=1", "--recompute-block", "--synthetic", *flags]) == 0
    del given["train-file"]
    small = {"from-scratch": True, "vocab-size": VOCAB, "seq-len": 16, "device": "cpu"}
    with open_trainer(given | small, 1) as trainer:
        assert (trainer.model.num_layers, trainer.model.vocab_size) == (2, VOCAB)
    with pytest.raises(LlmqError, match=r"^--vocab-size: auto needs token files"):
        read_runs({"model": "tiny", "vocab-size": "auto"}, None)
    assert len(read_runs({"model": "tiny", "num-layers": [1, 2]}, None)) == 2


def options_of_python(place):
    given = options(**place)
    given = {k: v for k, v in given.items() if k != "overwrite"}
    return {name.replace("-", "_"): value for name, value in given.items()}
