"""TrainConfig: defaults, values from text and files, what they imply, what is refused."""

import dataclasses
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from llmq.errors import ConfigError
from llmq.option_types import NEWEST, parse_dtype_name, parse_size
from llmq.options import OPTIONS, TrainConfig
from llmq.options_io import make_config, option_rows
from llmq.presets import preset

# Defaults of the program whose command lines must run unchanged.
LLMQ_DEFAULTS = {
    "model": ".",
    "from-scratch": False,
    "init-proj-to-zero": False,
    "model-dtype": "bf16",
    "matmul-dtype": "bf16",
    "gradient-dtype": "bf16",
    "train-file": "data/tiny-shakespeare-qwen/train.bin",
    "eval-file": "data/tiny-shakespeare-qwen/eval.bin",
    "train-seed": 0x83B45442,
    "eval-seed": 0x384B4524,
    "batch": 4,
    "batch-size": 4,
    "seq-len": 1024,
    "seq-length": 1024,
    "lmhead-chunks": 1,
    "attn-bwd-chunks": 1,
    "lr": 1e-5,
    "learning-rate": 1e-5,
    "warmup": 0,
    "cooldown": 0,
    "final-lr-fraction": 1.0,
    "lr-schedule": "cosine",
    "beta-1": 0.9,
    "beta-2": 0.95,
    "adam-epsilon": 1e-8,
    "opt-m-dtype": "fp32",
    "opt-v-dtype": "fp32",
    "grad-accumulation": 4,
    "grad-clip": 1.0,
    "weight-decay": 0.1,
    "z-loss": 0.0,
    "steps": -1,
    "epochs": 1,
    "eval-every-n-steps": 100,
    "eval-num-steps": 100,
    "name": "llmq",
    "out-dir": Path("output/llmq"),
    "checkpoint-dir": Path("ckpt/llmq"),
    "ckpt-interval": 100,
    "ckpt-keep-n": -1,
    "ckpt-major": -1,
    "save-training-state": True,
    "continue": None,
    "new-data": False,
    "log-gpu-util": 25,
    "debug-log-allocations": -1,
    "debug-time-breakdown": False,
    "recompute-swiglu": False,
    "recompute-norm": False,
    "recompute-ffn": False,
    "recompute-qkv": False,
    "recompute-att": False,
    "recompute-block": False,
    "gpus": 0,
}


def test_defaults_of_known_flags():
    config = make_config({})
    by_flag = {flag: getattr(config, name) for name, opt in OPTIONS.items() for flag in opt.flags}
    assert {flag: by_flag[flag] for flag in LLMQ_DEFAULTS} == LLMQ_DEFAULTS
    own = {
        "master-dtype": "bf16",
        "grad-accum-dtype": "bf16",
        "seed": 42,
        "memory-limit": None,
        "device": "auto",
        "use-cuda-graphs": True,
        "attention": "auto",
        "tune": True,
    }
    del by_flag["log-file"]  # holds the time
    assert by_flag == LLMQ_DEFAULTS | own


def test_class_is_frozen_slotted_keyword_only_and_documented():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3
    assert not hasattr(TrainConfig(), "__dict__")
    with pytest.raises(TypeError):
        TrainConfig("tiny")
    for name, opt in OPTIONS.items():
        assert opt.help and not opt.help.endswith("."), name
        assert "[" not in opt.help, f"{name}: brackets are markup in --help"


def test_flags_are_unique():
    flags = [flag for opt in OPTIONS.values() for flag in opt.flags]
    assert len(set(flags)) == len(flags)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", flag) for flag in flags)


@pytest.mark.parametrize(
    ("flag", "value", "field", "expected"),
    [
        ("batch", "8", "batch_size", 8),
        ("seq_length", 512, "seq_len", 512),
        ("lr", "3e-4", "learning_rate", 3e-4),
        ("lr", 1, "learning_rate", 1.0),
        ("train-seed", "0x10", "train_seed", 16),
        ("model-dtype", "Float32", "model_dtype", "fp32"),
        ("opt-m-dtype", "BF16", "opt_m_dtype", "bf16"),
        ("lr-schedule", "WSD", "lr_schedule", "wsd"),
        ("device", "CPU", "device", "cpu"),
        ("memory-limit", "16GiB", "memory_limit", 16 * 2**30),
        ("use-cuda-graphs", "off", "use_cuda_graphs", False),
        ("save-training-state", False, "save_training_state", False),
        ("continue", True, "continue_from", NEWEST),
        ("continue", False, "continue_from", None),
        ("continue", 300, "continue_from", "300"),
        ("continue", "ckpt/step_00000300", "continue_from", "ckpt/step_00000300"),
        ("checkpoint-dir", "~/%n/ck", "checkpoint_dir", Path("~/llmq/ck").expanduser()),
        ("name", 5, "name", "5"),
    ],
)
def test_values_are_converted(flag, value, field, expected):
    found = getattr(make_config({flag: value}), field)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch-size: must be at least 1, got 0"),
        ({"batch": "four"}, "--batch-size: expected an integer, got 'four'"),
        ({"batch": 4.0}, "--batch-size: expected an integer, got 4.0"),
        ({"batch": True}, "--batch-size: expected an integer, got True"),
        ({"lr": "fast"}, "--learning-rate: expected a number, got 'fast'"),
        ({"lr": "nan"}, "--learning-rate: expected a number, got 'nan'"),
        ({"lr": -1e-5}, "--learning-rate: must be at least 0, got -1e-05"),
        ({"from-scratch": "maybe"}, "--from-scratch: expected true or false, got 'maybe'"),
        ({"model-dtype": "fp8"}, "--model-dtype: FP8 alone is ambiguous, give e4m3 or e5m2"),
        ({"model-dtype": "e4m3"}, "--model-dtype: expected bf16 or fp32, got 'e4m3'"),
        ({"model-dtype": "half"}, "--model-dtype: expected bf16 or fp32, got 'fp16'"),
        ({"opt-v-dtype": "int8"}, "--opt-v-dtype: unknown dtype 'int8', expected one of fp32,"),
        ({"lr-schedule": "step"}, "--lr-schedule: expected cosine or linear or wsd, got 'step'"),
        ({"memory-limit": "lots"}, "--memory-limit: expected a size such as 512MiB or 16GiB"),
        ({"memory-limit": "0"}, "--memory-limit: must be at least 1, got 0"),
        ({"train-seed": 2**64}, f"--train-seed: must be at most {2**64 - 1}"),
        ({"seed": -1}, "--seed: must be at least 0"),
        ({"name": ""}, "--name: expected text, got ''"),
        ({"train-file": ["a", "b"]}, "--train-file: expected text, got ['a', 'b']"),
        ({"beta-1": 1}, "--beta-1: must be less than 1, got 1.0"),
        ({"beta-2": 1.5}, "--beta-2: must be less than 1, got 1.5"),
        ({"seq-len": 1022}, "--seq-len: must be a multiple of 4, got 1022"),
        ({"lmhead-chunks": 3}, "--lmhead-chunks: 3 does not divide the 4096 tokens"),
        ({"attn-bwd-chunks": 3}, "--attn-bwd-chunks: 3 does not divide --batch-size 4"),
        ({"steps": 5, "epochs": 1}, "--epochs: excludes --steps"),
        ({"steps": -2}, "--steps: must be at least -1"),
        ({"init-proj-to-zero": True}, "--init-proj-to-zero: needs --from-scratch"),
        ({"new-data": True}, "--new-data: needs --continue"),
        ({"device": "cpu", "attention": "cudnn"}, "--attention: cudnn needs a GPU"),
        ({"model-dtype": "fp32", "master-dtype": "bf16"}, "--master-dtype: bf16 is too coarse"),
        ({"model-dtype": "fp32", "grad-accum-dtype": "bf16"}, "--grad-accum-dtype: bf16 is too"),
        ({"batch": 4, "batch-size": 4}, "batch-size is given twice, under two names"),
        ({"lerning-rate": 1}, "unknown option lerning-rate, did you mean learning-rate?"),
        ({"zzz": 1}, "unknown option zzz; llmq train --help lists them"),
        ({"model-dtype": "fp32", "matmul-dtype": "e4m3"}, "--matmul-dtype: e4m3 does not go with"),
        ({"matmul-dtype": "e5m2"}, "--matmul-dtype: expected"),
        ({"gradient-dtype": "e4m3"}, "--gradient-dtype: e4m3 needs --matmul-dtype e4m3"),
        ({"matmul-dtype": "e4m3", "gradient-dtype": "bf16"}, "--gradient-dtype: must be e4m3 or"),
    ],
)
def test_bad_values_name_the_flag_in_one_line(options, message):
    with pytest.raises(ConfigError) as error:
        make_config(options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_legal_corner_values():
    make_config({"grad-clip": 0, "weight-decay": 0, "lr": 0, "warmup": 0, "beta-1": 0, "steps": 0})
    make_config({"steps": -1, "epochs": 3})
    make_config({"init-proj-to-zero": True, "from-scratch": True})
    make_config({"new-data": True, "continue": True})
    make_config({"model-dtype": "bf16", "master-dtype": "fp32", "grad-accum-dtype": "fp32"})
    for m in ("fp32", "bf16"):
        for v in ("fp32", "bf16"):
            make_config({"opt-m-dtype": m, "opt-v-dtype": v})


def test_dtype_spellings():
    spellings = {
        "fp32": "F32 FP32 float float32 single",
        "fp16": "FP16 F16 float16 half",
        "bf16": "BF16 bfloat16",
        "e4m3": "E4M3 fp8_e4m3 F8_E4M3 float8_e4m3 float8_e4m3fn",
        "e5m2": "E5M2 fp8_e5m2 F8_E5M2 float8_e5m2",
    }
    for canonical, words in spellings.items():
        for word in words.split():
            assert parse_dtype_name(word) == parse_dtype_name(word.swapcase()) == canonical


def test_sizes():
    sizes = {
        "0": 0,
        "512": 512,
        "64 KiB": 65536,
        "1.5MiB": 3 << 19,
        "2g": 2 << 30,
        "16GB": 16 * 10**9,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    for bad in ("", "GiB", "-1GiB", "1XiB", "1 2", True, None):
        with pytest.raises(ValueError, match="expected a size"):
            parse_size(bad)


@pytest.mark.parametrize(
    ("given", "implied"),
    [
        ({"swiglu"}, set()),
        ({"ffn"}, {"swiglu"}),
        ({"att"}, {"qkv"}),
        ({"block"}, {"att", "qkv", "ffn", "swiglu", "norm"}),
    ],
)
def test_recompute_implications(given, implied):
    config = make_config({f"recompute-{part}": True for part in given})
    on = {name for name in OPTIONS if name.startswith("recompute_") and getattr(config, name)}
    assert on == {f"recompute_{part}" for part in given | implied}


def test_formats_follow_the_model_dtype():
    config = make_config({"model-dtype": "fp32"})
    assert (config.master_dtype, config.grad_accum_dtype) == ("fp32", "fp32")
    config = make_config({"model-dtype": "bf16", "master-dtype": "fp32"})
    assert (config.master_dtype, config.grad_accum_dtype) == ("fp32", "bf16")


def test_epochs_are_implied_only_without_steps():
    assert make_config({}).epochs == 1
    assert make_config({"steps": 7}).epochs is None


def test_names_and_log_file():
    start = datetime(2026, 3, 4, 5, 6, 59, tzinfo=UTC)
    config = TrainConfig(name="run/a", out_dir=Path("x/%n/%n"), checkpoint_dir=Path("c"))
    config = config.normalized(start)
    assert config.log_file == Path("logs/run/a-2026-03-04T05_06.json")
    assert config.out_dir == Path("x/run/a/run/a")
    assert config.checkpoint_dir == Path("c")
    named = TrainConfig(name="b", log_file=Path("%n.json")).normalized(start)
    assert named.log_file == Path("b.json")


def test_normalizing_twice_changes_nothing():
    config = make_config({"recompute-block": True, "steps": 4, "continue": "12"})
    assert config.normalized() == config
    assert TrainConfig(model_dtype="BF16").normalized().model_dtype == "bf16"


def test_sequence_must_fit_the_model():
    config = make_config({"seq-len": 1028})
    with pytest.raises(ConfigError, match="--seq-len: 1028 exceeds the model's 1024 positions"):
        config.validate_with(preset("tiny"))
    assert config.validate_with(preset("qwen2.5-0.5b")) is config
    with pytest.raises(ConfigError, match="--beta-1"):  # everything else is checked too
        dataclasses.replace(config, beta_1=2.0).validate_with(preset("qwen2.5-0.5b"))


def test_warnings():
    assert make_config({}).warnings() == []
    assert make_config({"ckpt-major": 10, "ckpt-keep-n": 2}).warnings() == []
    options = {"ckpt-major": 10, "final-lr-fraction": 0.1, "lr-schedule": "wsd"}
    lines = make_config({**options, "steps": 5, "warmup": 6}).warnings()
    assert [line.split()[0] for line in lines] == [
        "--ckpt-major",
        "--final-lr-fraction",
        "--warmup",
    ]


FILE_VALUES = {"batch_size": 8, "learning-rate": "1e-3", "recompute_ffn": True, "steps": 20}


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.json"])
def test_config_file_lies_under_the_command_line(tmp_path, name):
    file = tmp_path / name
    lines = [f"{key}: {json.dumps(value)}" for key, value in FILE_VALUES.items()]
    is_json = name.endswith("json")
    file.write_text(json.dumps(FILE_VALUES) if is_json else "\n".join(lines))
    config = make_config({"batch": "2", "recompute-ffn": False}, file)
    assert (config.batch_size, config.learning_rate, config.steps) == (2, 1e-3, 20)
    assert not config.recompute_ffn
    assert config == dataclasses.replace(
        make_config({"batch": 2, "lr": 1e-3, "steps": 20}), log_file=config.log_file
    )


def test_yaml_numbers_need_no_dot(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\neval-every-n-steps:\ncontinue: true\ntrain-seed: 0x10\n")
    config = make_config({}, file)
    assert (config.learning_rate, config.train_seed) == (1e-3, 16)
    assert config.eval_every_n_steps == 100  # an empty value is no value
    assert config.continue_from == NEWEST
    file.write_text("")
    assert make_config({}, file).batch_size == 4


def test_given_steps_replace_the_epochs_of_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 3")
    config = make_config({"steps": "5"}, file)
    assert (config.steps, config.epochs) == (5, None)
    file.write_text("steps: 3")
    config = make_config({"epochs": "5"}, file)
    assert (config.steps, config.epochs) == (-1, 5)
    file.write_text("steps: 3\nepochs: 2")
    with pytest.raises(ConfigError, match="--epochs: excludes --steps"):
        make_config({}, file)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "batchsize: 3", "a.yaml: unknown option batchsize, did you mean batch-size?"),
        ("a.yaml", "batch: 3\nbatch_size: 3", "a.yaml: batch_size is given twice"),
        ("a.yaml", "lr: fast", "a.yaml: --learning-rate: expected a number"),
        ("a.yaml", "lr: [1", "a.yaml is not valid: "),
        ("a.json", "lr: 1", "a.json is not valid: "),
        ("a.yaml", "- lr", "a.yaml must hold one mapping"),
        ("missing.yaml", None, "missing.yaml: No such file or directory"),
    ],
)
def test_bad_config_files(tmp_path, name, text, message):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as error:
        make_config({}, file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


LLMQ_ROWS = """
    name recompute-swiglu recompute-norm recompute-ffn recompute-qkv recompute-att recompute-block
    lm-head-chunks attn-bwd-chunks cuda-graphs matmul-dtype gradient-dtype model-dtype opt-m-dtype
    opt-v-dtype learning-rate warmup cooldown final-lr lr-schedule beta-1 beta-2 grad-clip
    weight-decay grad-accumulation
    micro-batch seq-len total-batch steps-per-epoch steps eval-every-n-steps eval-num-steps
    ckpt-every-n-steps ckpt-keep ckpt-major train-loader-seed eval-loader-seed arch vocab-size
    hidden-size ffn-size num-layers tied-word-emb num-heads num-kv-heads train-file eval-file
    checkpoint-dir out-dir log-file
""".split()


def test_option_rows():
    config = make_config({"batch": 2, "seq-len": 64, "lr": 1e-4, "model-dtype": "bf16"})
    rows = option_rows(config, preset("tiny"), world_size=3, steps_per_epoch=11, total_steps=22)
    names = [name for name, _ in rows]
    assert names[: len(LLMQ_ROWS)] == LLMQ_ROWS
    assert len(set(names)) == len(names)
    assert {type(value) for _, value in rows} <= {bool, int, float, str}
    values = dict(rows)
    assert values["total-batch"] == 2 * 64 * 4 * 3
    assert (values["steps-per-epoch"], values["steps"]) == (11, 22)
    assert (values["model-dtype"], values["opt-m-dtype"]) == ("BF16", "F32")
    assert (values["final-lr"], values["learning-rate"]) == (1.0, 1e-4)
    assert (values["arch"], values["tied-word-emb"]) == ("Qwen2", True)
    assert (values["out-dir"], values["continue"]) == ("output/llmq", "none")


def test_option_rows_echo_every_option():
    renamed = {"lmhead-chunks", "use-cuda-graphs", "final-lr-fraction", "batch-size"}
    renamed |= {"ckpt-interval", "ckpt-keep-n", "train-seed", "eval-seed"}
    names = {name for name, _ in option_rows(make_config({}), preset("gpt2"))}
    assert {opt.flags[0] for opt in OPTIONS.values()} - renamed <= names
    assert not names & {"total-batch", "steps-per-epoch"}
