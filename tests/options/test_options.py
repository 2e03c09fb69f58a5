"""TrainConfig: defaults, values from text and files, what they imply, what is refused."""

import dataclasses
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from llmq.base.errors import ConfigError
from llmq.options.conditions import Length, Ranks
from llmq.options.option_types import (
    NEWEST,
    layer_set,
    parse_dtype_name,
    parse_every,
    parse_layers,
    parse_size,
)
from llmq.options.options import GROUPS, OPTIONS, TrainConfig
from llmq.options.options_io import make_config, option_rows
from llmq.options.presets import preset
from llmq.options.rules import RULES
from llmq.plan.plan import make_plan
from llmq.runtime.machine import PLAN_SPEC

FP8 = {"matmul-dtype": "e4m3"}
HALF = FP8 | {"fp8-accumulate": "fp16"}


@pytest.mark.parametrize(
    ("batch", "more", "parts"),
    [(32, {}, 2), (31, {}, 1), (64, {}, 4), (4, {"lora-rank": 8}, 8), (1000000, {}, 512)],
)
def test_logits_are_made_of_so_many_tokens_that_products_are_as_fast(batch, more, parts):
    config = make_config({"batch-size": batch, "seq-len": 1024, "from-scratch": True} | more)
    assert config.lmhead_chunks == parts


def test_class_is_frozen_keyword_only_and_documented():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3
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
        ({"from-scratch": "maybe"}, "--from-scratch: expected true or false, got 'maybe'"),
        ({"model-dtype": "fp8"}, "--model-dtype: FP8 alone is ambiguous, give e4m3 or e5m2"),
        ({"model-dtype": "e4m3"}, "--model-dtype: expected bf16 or fp32, got 'e4m3'"),
        ({"model-dtype": "half"}, "--model-dtype: expected bf16 or fp32, got 'fp16'"),
        ({"opt-v-dtype": "int4"}, "--opt-v-dtype: unknown dtype 'int4', expected one of bf16, fp"),
        ({"lr-schedule": "step"}, "--lr-schedule: expected cosine or linear or wsd, got 'step'"),
        ({"memory-limit": "lots"}, "--memory-limit: expected a size such as 512MiB or 16GiB"),
        ({"memory-limit": "8"}, "--memory-limit: must be at least 1024 bytes, got 8 bytes"),
        ({"train-seed": 2**64}, f"--train-seed: must be at most {2**64 - 1}"),
        ({"seed": -1}, "--seed: must be at least 0"),
        ({"name": ""}, "--name: expected text, got ''"),
        ({"train-file": [1, []]}, "--train-file: expected text, got []"),
        ({"beta-1": 1}, "--beta-1: must be less than 1, got 1.0"),
        ({"beta-2": 1.5}, "--beta-2: must be less than 1, got 1.5"),
        ({"beta-1": -0.1}, "--beta-1: must be at least 0, got -0.1"),
        ({"beta-2": "nan"}, "--beta-2: expected a number, got 'nan'"),
        ({"adam-epsilon": 0}, "--adam-epsilon: must be greater than 0 (in F32, at least 1.2e-38)"),
        ({"adam-epsilon": -1e-8}, "--adam-epsilon: must be greater than 0"),
        ({"adam-epsilon": 1e-46}, "--adam-epsilon: must be greater than 0"),
        ({"adam-epsilon": "inf"}, "--adam-epsilon: expected a number, got 'inf'"),
        ({"weight-decay": -0.1}, "--weight-decay: must be at least 0, got -0.1"),
        ({"grad-clip": -1}, "--grad-clip: must be at least 0, got -1.0"),
        ({"seq-len": 1022}, "--seq-len: must be a multiple of 4, got 1022"),
        ({"lmhead-chunks": 3}, "--lmhead-chunks: 3 does not divide the 4096 tokens"),
        ({"attn-bwd-chunks": 3}, "--attn-bwd-chunks: 3 does not divide --batch-size 4, and is no"),
        ({"attn-bwd-chunks": 6}, "--attn-bwd-chunks: 6 does not divide --batch-size 4, and is no"),
        ({"steps": 5, "epochs": 1}, "--epochs: excludes --steps"),
        ({"steps": -2}, "--steps: must be at least -1"),
        ({"steps": 4, "cooldown": 5}, "--cooldown: 5 steps are more than the 4 of the whole run"),
        ({"out-dir": "~nosuchuser/x"}, "--out-dir: ~ names a user who has no home directory here"),
        ({"memory-limit": "9" * 400}, "--memory-limit: expected a size of less than 8192 PiB"),
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
        ({"opt-m-dtype": "e5m2"}, "--opt-m-dtype: expected bf16 or fp32 or e4m3, got 'e5m2'"),
        ({"head-dtype": "e4m3"}, "--head-dtype: e4m3 does not go with --matmul-dtype bf16"),
        ({"head-dtype": "fp32"}, "--head-dtype: fp32 does not go with --matmul-dtype bf16"),
        (
            {"head-dtype": "fp32", "matmul-dtype": "e4m3"},
            "--head-dtype: fp32 does not go with --model-dtype bf16, use bf16 or e4m3",
        ),
        ({"fp8-recipe": "delayed"}, "--fp8-recipe: delayed needs --matmul-dtype e4m3"),
        (
            {"mlp-dtype": "e4m3"},
            "--mlp-dtype: e4m3 needs --matmul-dtype e4m3 and --fp8-recipe delayed",
        ),
        (
            {"mlp-dtype": "e4m3", "matmul-dtype": "e4m3"},
            "--mlp-dtype: e4m3 needs --matmul-dtype e4m3 and --fp8-recipe delayed",
        ),
        (
            {"mlp-dtype": "fp32"},
            "--mlp-dtype: fp32 does not go with --model-dtype bf16, use bf16 or e4m3",
        ),
        (
            {
                "mlp-dtype": "e4m3",
                "matmul-dtype": "e4m3",
                "fp8-recipe": "delayed",
                "lora-rank": 8,
                "base-dtype": "e4m3",
            },
            "--mlp-dtype: e4m3 does not go with adapters",
        ),
        ({"fp8-recipe": "mx"}, "--fp8-recipe: expected jit or delayed, got 'mx'"),
        ({"fp8-fast-accumulation": "on"}, "--fp8-fast-accumulation: expected none or forward or"),
        ({"fp8-accumulate": "fp16"}, "--fp8-accumulate: fp16 needs --matmul-dtype e4m3"),
        (
            HALF | {"fp8-fast-accumulation": "none"},
            "--fp8-accumulate: fp16 is for what --fp8-fast-",
        ),
        (HALF | {"gradient-dtype": "e5m2"}, "--fp8-accumulate: fp16 needs --gradient-dtype e4m3:"),
        (
            HALF | {"lora-rank": 8, "base-dtype": "e4m3"},
            "--fp8-accumulate: fp16 does not go with ad",
        ),
        (
            HALF | {"mlp-dtype": "e4m3", "fp8-recipe": "delayed"},
            "--fp8-accumulate: fp16 does not go with --mlp-dtype e4m3",
        ),
        (
            HALF | {"fp8-fast-accumulation": "all", "grad-accum-dtype": "fp32"},
            "--fp8-accumulate: fp16 with --fp8-fast-accumulation all needs --grad-accum-dtype bf16",
        ),
        ({"gpus": 1000}, "--gpus: must be at most 64, got 1000"),
        ({"zero-level": 4}, "--zero-level: must be at most 3, got 4"),
        ({"zero-level": -1}, "--zero-level: must be at least 0, got -1"),
        ({"persistent-quants": True}, "--persistent-quants: needs --matmul-dtype e4m3"),
        (
            {"persistent-quants": True, "matmul-dtype": "e4m3"},
            "--persistent-quants: needs --shard-weights",
        ),
        ({"offload-quants": True}, "--offload-quants: needs --persistent-quants"),
        ({"offload-gradients": True}, "--offload-gradients: needs --shard-gradients or"),
        ({"p2p": "maybe"}, "--p2p: expected auto or on or off, got 'maybe'"),
        ({"watchdog": -1}, "--watchdog: must be at least 0, got -1"),
        ({"recompute-layers": "1-"}, "--recompute-layers: expected all or layers such as 0-11,20"),
        ({"recompute-layers": ""}, "--recompute-layers: expected all or layers"),
        ({"recompute-layers": "5-3"}, "--recompute-layers: expected all or layers"),
        ({"debug-log-abs-max": "often"}, "--debug-log-abs-max: expected an integer, got 'often'"),
        ({"debug-log-abs-max": -2}, "--debug-log-abs-max: must be at least -1, got -2"),
    ],
)
def test_bad_values_name_the_flag_in_one_line(options, message):
    with pytest.raises(ConfigError) as error:
        make_config(options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_numbers_of_numpy():
    """Scripts have them: they become Python's own, which the log and checkpoints can hold."""
    given = {
        "batch": np.int64(2),
        "seq-len": np.uint16(64),
        "seed": np.array(7)[()],
        "lr": np.float32(0.5),
        "weight-decay": np.int32(1),
        "memory-limit": np.int64(1 << 30),
        "debug-log-abs-max": np.int8(3),
    }
    config = make_config(given)
    expected = {flag: value.item() for flag, value in given.items()}
    assert config == dataclasses.replace(make_config(expected), log_file=config.log_file)
    types = {type(v) for v in (config.batch_size, config.seq_len, config.debug_log_abs_max)}
    assert types == {int}
    assert {type(config.learning_rate), type(config.weight_decay)} == {float}
    for value in (np.float64(2.0), np.bool_(True), np.array([2])):
        with pytest.raises(ConfigError, match="--batch-size: expected an integer"):
            make_config({"batch": value})


def test_layers():
    assert layer_set("all", 3) == {0, 1, 2}
    assert layer_set("0", 3) == {0}
    assert layer_set("0-2,2,5-5", 6) == {0, 1, 2, 5}
    for bad in ("3", "1-3", "0,7"):
        with pytest.raises(ValueError, match=f"{bad} names layers that a model of 3 does not have"):
            layer_set(bad, 3)
    assert parse_layers(" ALL ") == "all"
    assert parse_layers("0 - 11, 20") == "0-11,20"
    assert parse_layers(7) == "7"  # from YAML
    for bad in ("", "some", "-1", "1,", "1-2-3", "1..3", "4-2", None, True):
        with pytest.raises(ValueError, match="expected all or layers such as"):
            parse_layers(bad)


def test_steps_between_records():
    assert [parse_every(value) for value in (True, False, 3, "0x10", "-1")] == [1, -1, 3, 16, -1]
    for bad in ("every", 1.5, None):
        with pytest.raises(ValueError, match="expected an integer"):
            parse_every(bad)


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
        "8388607TiB": 8388607 << 40,
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
    parts = {name for name in OPTIONS if name.startswith("recompute_")} - {"recompute_layers"}
    on = {name for name in parts if getattr(config, name)}
    assert on == {f"recompute_{part}" for part in given | implied}


@pytest.mark.parametrize(
    ("given", "gradients", "weights"),
    [
        ({"zero-level": 0}, False, False),
        ({"zero-level": 1}, False, False),
        ({"zero-level": 2}, True, False),
        ({"zero-level": 3}, True, True),
        ({"zero-level": 2, "shard-weights": True}, True, True),
        ({"shard-gradients": True}, True, False),
        ({"shard-weights": True}, False, True),
    ],
)
def test_what_is_sharded(given, gradients, weights):
    config = make_config(given)
    assert (config.shard_gradients, config.shard_weights) == (gradients, weights)
    # Options that need sharding count what the level implies.
    quants = {"persistent-quants": True, "offload-quants": True, "matmul-dtype": "e4m3"}
    for needed, flags in ((weights, quants), (gradients, {"offload-gradients": True})):
        if needed:
            make_config(given | flags)
            continue
        with pytest.raises(ConfigError, match=r"needs --shard-(weights|gradients)"):
            make_config(given | flags)


def test_formats_follow_the_model_dtype():
    config = make_config({"model-dtype": "fp32"})
    assert (config.master_dtype, config.grad_accum_dtype) == ("fp32", "fp32")
    assert (config.matmul_dtype, config.gradient_dtype, config.head_dtype) == ("fp32",) * 3
    config = make_config({"model-dtype": "bf16", "master-dtype": "fp32"})
    assert (config.master_dtype, config.grad_accum_dtype) == ("fp32", "bf16")
    config = make_config({"matmul-dtype": "e4m3"})
    assert (config.gradient_dtype, config.head_dtype) == ("e4m3", "bf16")


@pytest.mark.parametrize(
    ("off", "implying", "named"),
    [
        ("recompute-att", {"recompute-block": True}, "--recompute-block"),
        ("recompute-ffn", {"recompute-block": True}, "--recompute-block"),
        ("recompute-norm", {"recompute-block": True}, "--recompute-block"),
        ("recompute-qkv", {"recompute-block": True}, "--recompute-block"),
        ("recompute-qkv", {"recompute-att": True}, "--recompute-att"),
        ("recompute-swiglu", {"recompute-ffn": True}, "--recompute-ffn"),
        ("shard-gradients", {"zero-level": 2}, "--zero-level 2"),
        ("shard-gradients", {"zero-level": 3}, "--zero-level 3"),
        ("shard-weights", {"zero-level": 3}, "--zero-level 3"),
    ],
)
def test_what_is_implied_cannot_be_given_as_off(tmp_path, off, implying, named):
    message = f"--no-{off}: {named} implies --{off}: leave out one of them"
    with pytest.raises(ConfigError, match=message):
        make_config(implying | {off: False})
    file = tmp_path / "run.json"
    for in_file, given in ((implying, {off: False}), ({off: False}, implying)):
        file.write_text(json.dumps(in_file))
        with pytest.raises(ConfigError, match=message):
            make_config(given, file)
    assert not getattr(make_config({off: False}), off.replace("-", "_"))
    implying = implying | {"log-file": "log.json"}  # else named by the second
    assert make_config(implying | {off: True}) == make_config(implying)


def test_names_and_log_file():
    start = datetime(2026, 3, 4, 5, 6, 59, tzinfo=UTC)
    config = TrainConfig(name="run-a", out_dir=Path("x/%n/%n"), checkpoint_dir=Path("c"))
    config = config.normalized(start)
    assert config.log_file == Path("logs/run-a-2026-03-04T05_06_59.json")
    assert config.out_dir == Path("x/run-a/run-a")
    assert config.checkpoint_dir == Path("c")
    named = TrainConfig(name="b", log_file=Path("%n.json")).normalized(start)
    assert named.log_file == Path("b.json")


def test_normalizing_twice_changes_nothing():
    options = {"recompute-block": True, "steps": 4, "continue": "12", "zero-level": 3}
    config = make_config(options | {"recompute-layers": "0,2-3", "debug-log-abs-max": True})
    assert config.normalized() == config
    assert TrainConfig(model_dtype="BF16").normalized().model_dtype == "bf16"


def test_sequence_must_fit_the_model():
    config = make_config({"seq-len": 1028})
    with pytest.raises(ConfigError, match="--seq-len: 1028 exceeds the model's 1024 positions"):
        config.validate_with(preset("tiny"))
    assert config.validate_with(preset("qwen2.5-0.5b")) is config
    with pytest.raises(ConfigError, match="--beta-1"):  # everything else is checked too
        dataclasses.replace(config, beta_1=2.0).validate_with(preset("qwen2.5-0.5b"))


def test_layers_must_be_in_the_model():
    options = {"recompute-block": True, "batch": 1, "seq-len": 64}
    make_config(options | {"recompute-layers": "0-5"}).validate_with(preset("tiny"))
    config = make_config(options | {"recompute-layers": "2-6"})
    message = "--recompute-layers: 2-6 names layers that a model of 6 does not have"
    with pytest.raises(ConfigError, match=message):
        config.validate_with(preset("tiny"))


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"model": {"hidden_size": 136}}, "hidden_size is 136"),
        ({"model": {"intermediate_size": 72}}, "intermediate_size is 72"),
        ({"model": {"num_heads": 3, "head_dim": 24}}, "width of the query heads is 72"),
        (
            {"model": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 10}},
            "width of the query heads is 20",
        ),
    ],
)
def test_sizes_of_fp8_products(options, size):
    changes = options.pop("model", {})
    model = dataclasses.replace(preset("tiny-llama"), **changes)
    with pytest.raises(ConfigError, match=f"e4m3 needs multiples of 16, but the {size}"):
        make_config({"matmul-dtype": "e4m3", **options}).validate_with(model)
    if changes:
        make_config({"model-dtype": "bf16", **options}).validate_with(model)


def test_warnings():
    assert RULES.idle(make_config({})) == []
    assert RULES.idle(make_config({"ckpt-major": 10})) == []
    assert RULES.idle(make_config({"ckpt-interval": 0, "save-training-state": False})) == []
    options = {"ckpt-major": 10, "ckpt-keep-n": -1}
    options |= {"final-lr-fraction": 0.1, "lr-schedule": "wsd", "cooldown": "20%"}
    lines = RULES.idle(make_config({**options, "steps": 5, "warmup": 6}))
    told = ["--warmup", "--final-lr-fraction", "--ckpt-major"]
    assert [line.split()[0] for line in lines] == told
    never = {"ckpt-interval": 0, "save-training-state": False}
    (line,) = RULES.idle(make_config({"ckpt-major": 10} | never))
    assert line == "--ckpt-major=10 has no effect without --ckpt-interval and --save-training-state"
    kept = {"ckpt-keep-n": 2, "ckpt-interval": 0, "save-training-state": True}
    assert RULES.idle(make_config(kept)) == []
    (line,) = RULES.idle(make_config({**kept, "save-training-state": False}))
    assert line.startswith("--ckpt-keep-n 2 has no effect")
    assert RULES.idle(make_config({"lr-schedule": "linear", "final-lr-fraction": 0.1})) == []


OFFLOAD = {"offload-opt-m": True}


@pytest.mark.parametrize(
    ("without", "remedies"),
    [
        ({"zero-level": 0}, [{"zero-level": 1}]),
        ({"offload-master": True}, [{"shard-weights": True}, FP8, {"master-dtype": "fp32"}]),
        (
            {"use-zero-copy": True},
            [OFFLOAD, {"offload-opt-v": True}, {"offload-gradients": True, "zero-level": 2}],
        ),
        ({"write-combined": True}, [OFFLOAD, {"offload-gradients": True, "zero-level": 2}]),
        ({"memcpy-send-recv": True}, [{"all-to-all-reduce": True}]),
        ({"recompute-layers": "0-3"}, [{"recompute-norm": True}]),
        ({"debug-log-abs-max": True}, [FP8]),
        ({"fp8-fast-accumulation": "all"}, [FP8]),
        ({"fp8-fast-accumulation": "none"}, [FP8]),
        ({"keep-transposed": False}, [FP8]),
    ],
)
def test_options_that_do_nothing_alone(without, remedies):
    (flag,) = without
    (line,) = RULES.idle(make_config(without))
    assert re.match(f"--(no-)?{flag}[ =]", line)
    assert re.search("has no effect|is the same as", line)
    for options in remedies:
        assert RULES.idle(make_config(without | options)) == []


def test_heads_that_native_attention_does_not_divide():
    given = {"batch-size": 2, "attn-bwd-chunks": 4}
    assert RULES.idle(make_config(given)) == []
    for where in ({"attention": "native"}, {"device": "cpu"}):
        (line,) = RULES.idle(make_config(given | where))
        assert line.startswith("--attn-bwd-chunks=4 is the same as 2: native attention")
        assert RULES.idle(make_config(given | where | {"attn-bwd-chunks": 2})) == []


def test_host_memory_of_residuals_is_not_the_optimizers():
    """--offload-residual makes neither option of the other offloaded tensors useful."""
    for flag in ("use-zero-copy", "write-combined"):
        (line,) = RULES.idle(make_config({flag: True, "offload-residual": True}))
        assert line.startswith(f"--{flag} has no effect without")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"memcpy-all-gather": False}, "without --memcpy-all-gather"),
        ({"shard-weights": False}, "without --shard-weights"),
        ({"p2p": "on"}, "with --p2p on"),
        ({"offload-master": True}, "with --offload-master"),
        ({"offload-master": True, "master-dtype": "fp32"}, None),
        (FP8, "without --persistent-quants"),
        (FP8 | {"persistent-quants": True}, None),
        (FP8 | {"persistent-quants": True, "offload-quants": True}, "with --offload-quants"),
    ],
)
def test_mirrors_that_nobody_would_read(options, reason):
    given = {"mirror-weights": True, "memcpy-all-gather": True, "shard-weights": True} | options
    lines = [] if reason is None else [f"--mirror-weights has no effect {reason}"]
    assert RULES.idle(make_config(given)) == lines
    assert RULES.idle(make_config(given | {"mirror-weights": False})) == []


def test_options_that_do_nothing_with_one_rank():
    between = {"memcpy-all-gather": True, "memcpy-send-recv": True, "all-to-all-reduce": True}
    between |= {"mirror-weights": True, "shard-weights": True, "persistent-quants": True, **FP8}
    config = make_config({**between, "p2p": "off"})
    assert RULES.idle(config) == []
    assert RULES.idle(config, ranks=Ranks(2)) == []
    assert [line.split(" has no effect")[0] for line in RULES.idle(config, ranks=Ranks(1))] == [
        "--memcpy-all-gather",
        "--memcpy-send-recv",
        "--mirror-weights",
        "--all-to-all-reduce",
        "--p2p off",
        "--shard-weights",
    ]
    assert RULES.idle(make_config({"watchdog": 5}), ranks=Ranks(1)) == []


@pytest.mark.parametrize(
    ("options", "steps", "line"),
    [
        ({"watchdog": 5}, 10, "--watchdog 5 has no effect with one GPU"),
        ({"eval-num-steps": 7, "eval-every-n-steps": 0}, 10, "--eval-num-steps 7 has no effect: "),
        ({"eval-num-steps": 7, "eval-every-n-steps": 10}, 10, "--eval-num-steps 7 has no effect"),
        ({"eval-num-steps": 7, "eval-every-n-steps": 9}, 10, None),
        ({"eval-num-steps": 7, "eval-every-n-steps": 0}, 11, None),  # a second epoch begins
    ],
)
def test_options_that_do_nothing_in_a_run_so_long(options, steps, line):
    config = make_config(options)
    assert RULES.idle(config) == RULES.idle(config, ranks=Ranks(1)) == []
    found = RULES.idle(config, length=Length(1, steps, 10))
    assert [text[: len(line or "")] for text in found] == ([line] if line else [])
    if "watchdog" in options:
        assert RULES.idle(config, length=Length(2, steps, 10)) == []


def test_the_seed_of_nothing():
    exact = {"model-dtype": "fp32", "seed": 7}
    (line,) = RULES.idle(make_config(exact))
    assert line.startswith("--seed 7 has no effect: in fp32")
    for rounded in ({"from-scratch": True}, {"model-dtype": "bf16"}, {"opt-v-dtype": "bf16"}):
        assert RULES.idle(make_config(exact | rounded)) == []


SHARDED, GRADIENTS = {"shard-weights": True}, {"shard-gradients": True}
PERSISTENT = FP8 | SHARDED | {"persistent-quants": True}


@pytest.mark.parametrize(
    ("options", "without", "reason"),
    [
        (GRADIENTS, {}, "--shard-gradients has no effect with one GPU without --offload-grad"),
        (GRADIENTS | {"offload-gradients": True}, {}, None),
        (SHARDED, {}, "--shard-weights has no effect with one GPU without --offload-master"),
        (SHARDED | {"offload-master": True}, {"offload-master": True}, None),
        (
            SHARDED | {"master-dtype": "fp32", "offload-master": True},
            {"master-dtype": "fp32", "offload-master": True},
            "--shard-weights has no effect with one GPU with --master-dtype fp32",
        ),
        (SHARDED | FP8, FP8, None),
        (PERSISTENT, FP8, "--shard-weights has no effect with one GPU with --persistent-quants"),
        (PERSISTENT | {"offload-quants": True}, FP8, None),
        ({"zero-level": 2}, {}, "--zero-level 2 has no effect with one GPU without --offload-g"),
        ({"zero-level": 3}, {}, "--zero-level 3 has no effect with one GPU without --offload-m"),
        ({"zero-level": 3} | FP8, FP8, None),
        (
            SHARDED | FP8 | {"keep-transposed": False},
            SHARDED | FP8,
            "--no-keep-transposed has no effect with --shard-weights",
        ),
        (
            PERSISTENT | {"offload-quants": True, "keep-transposed": False},
            PERSISTENT | {"offload-quants": True},
            "--no-keep-transposed has no effect with --shard-weights",
        ),
        (FP8 | {"keep-transposed": False}, FP8, None),
    ],
)
def test_sharding_that_does_nothing_with_one_rank(options, without, reason):
    """An option that is said to have no effect does not change what a step launches, and where."""
    common = {"model": "tiny", "from-scratch": True, "batch-size": 1, "seq-len": 64}
    config, plain = (make_config(common | changes) for changes in (options, without))
    lines = RULES.idle(config, ranks=Ranks(1))
    plans = [make_plan(c, preset("tiny"), PLAN_SPEC) for c in (config, plain)]
    one, other = ((p.usage, p.flops, p.traffic, p.launches, p.sources) for p in plans)
    assert (one == other) == (reason is not None)
    assert [line[: len(reason or "")] for line in lines] == ([reason] if reason else [])


def test_transposed_weights_of_several_ranks():
    config = make_config(PERSISTENT | {"keep-transposed": False})
    assert [line.split()[0] for line in RULES.idle(config, ranks=Ranks(2))] == [
        "--no-keep-transposed"
    ]
    assert (
        RULES.idle(make_config(FP8 | {"keep-transposed": False, "zero-level": 2}), ranks=Ranks(2))
        == []
    )


def test_options_that_do_nothing_on_the_cpu():
    options = {
        "tune": False,
        "use-cuda-graphs": False,
        "attention": "native",
        "fp8-fast-accumulation": "all",
        "write-combined": True,
        "memcpy-all-gather": True,
        "memcpy-send-recv": True,
        "p2p": "off",
    }
    config = make_config(options | {"device": "cpu"})
    assert RULES.idle(config) == [
        f"{flag} has no effect with --device cpu"
        for flag in (
            "--no-tune",
            "--no-use-cuda-graphs",
            "--attention native",
            "--fp8-fast-accumulation all",
            "--write-combined",
            "--memcpy-all-gather",
            "--memcpy-send-recv",
            "--p2p off",
        )
    ]
    assert (
        RULES.idle(config, ranks=Ranks(1)) == RULES.idle(config, ranks=Ranks(1, on_cpu=True)) == []
    )
    chosen = RULES.idle(make_config(options), ranks=Ranks(1, on_cpu=True))
    assert chosen == [
        line.replace("with --device cpu", "on the CPU") for line in RULES.idle(config)
    ]
    alone = make_config(options)
    assert not any("cpu" in line for line in RULES.idle(alone) + RULES.idle(alone, ranks=Ranks(1)))
    summed = make_config({"device": "cpu", "all-to-all-reduce": True})
    assert RULES.idle(summed, ranks=Ranks(1)) == ["--all-to-all-reduce has no effect with one GPU"]


FILE_VALUES = {"batch_size": 8, "learning-rate": "1e-3", "recompute_ffn": True, "steps": 20}


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.json", "run.toml"])
def test_config_file_lies_under_the_command_line(tmp_path, name):
    file = tmp_path / name
    lines = [f"{key}: {json.dumps(value)}" for key, value in FILE_VALUES.items()]
    if name.endswith("toml"):
        lines = [line.replace(": ", " = ") for line in lines]
    is_json = name.endswith("json")
    file.write_text(json.dumps(FILE_VALUES) if is_json else "\n".join(lines))
    config = make_config({"batch": "2", "recompute-ffn": False}, file)
    assert (config.batch_size, config.learning_rate, config.steps) == (2, 1e-3, 20)
    assert not config.recompute_ffn
    assert config == dataclasses.replace(
        make_config({"batch": 2, "lr": 1e-3, "steps": 20}), log_file=config.log_file
    )


@pytest.mark.parametrize("word", ["on", "off", "auto", "'off'", "OFF"])
def test_yaml_words_that_are_switches(tmp_path, word):
    file = tmp_path / "run.yaml"
    file.write_text(f"p2p: {word}\n")
    assert make_config({}, file).p2p == word.strip("'").lower()


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
        ("a.yaml", "restarts: 3", "a.yaml: restarts is for the command line of llmq train only"),
        ("a.yaml", "batch: 3\nbatch_size: 3", "a.yaml: batch_size is given twice"),
        ("a.yaml", "lr: 1\n# x\n'lr': 2", "a.yaml is not valid: line 3: lr is given in line 1 too"),
        ("a.json", '{"lr": 1, "steps": 3, "lr": 2}', "a.json is not valid: lr is given twice"),
        ("a.yaml", "lr: fast", "a.yaml: --learning-rate: expected a number"),
        ("a.yaml", "lr: [1", "a.yaml is not valid: "),
        ("a.json", "lr: 1", "a.json is not valid: "),
        ("a.yaml", b"lr: \xff", "a.yaml is not valid: "),
        ("a.json", b"\xff{}", "a.json is not valid: "),
        ("a.toml", "lr = 1\nlr = 2", "a.toml is not valid: "),
        ("a.toml", "lr: 1", "a.toml is not valid: "),
        ("a.toml", b"lr = '\xff'", "a.toml is not valid: "),
        ("a.toml", "[rates]\nlr = 1", "a.toml: unknown option rates"),
        ("a.yaml", "- lr", "a.yaml must hold one mapping"),
        ("missing.yaml", None, "missing.yaml: No such file or directory"),
    ],
)
def test_bad_config_files(tmp_path, name, text, message):
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        make_config({}, file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_option_rows_echo_every_option():
    renamed = {"lmhead-chunks", "use-cuda-graphs", "final-lr-fraction", "batch-size"}
    renamed |= {"ckpt-interval", "ckpt-keep-n", "train-seed", "eval-seed", "write-combined"}
    renamed |= {"intermediate-size", "tie-embeddings"}
    renamed |= {"num-experts", "active-experts", "expert-size"}  # of models that have any
    names = {name for name, _ in option_rows(make_config({}), preset("gpt2"))}
    assert {opt.flags[0] for opt in OPTIONS.values()} - renamed <= names
    assert not names & {"total-batch", "steps-per-epoch"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fp8_fast_accumulation": None}, "--fp8-fast-accumulation: has no value"),
        ({"z_loss": 1e308}, r"--z-loss: must be at most 1000\.0, got 1e\+308"),
    ],
)
def test_values_of_a_manifest_are_checked(options, said):
    """Somebody may have written a checkpoint's manifest."""
    with pytest.raises(ConfigError, match=said):
        TrainConfig(**options).normalized().validate()


def test_options_may_stand_in_their_groups(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {model: tiny, from-scratch: true}\nmemory:\n  recompute_block: true\nseed: 3\n"
    )
    config = make_config({"optim": {"learning-rate": 0.25}}, file)
    assert (config.model, config.from_scratch, config.seed) == ("tiny", True, 3)
    assert config.recompute_block and config.learning_rate == 0.25
    file.write_text("memory: {seed: 3}\n")
    with pytest.raises(ConfigError, match="memory: seed is of the group optim"):
        make_config({}, file)
    file.write_text("memory: {sed: 3}\n")
    with pytest.raises(ConfigError, match="unknown option sed, did you mean seed"):
        make_config({}, file)


def test_a_group_has_its_options_alone():
    config = make_config({"recompute-block": True, "seed": 3})
    memory = config.group(GROUPS["memory"])
    assert memory.recompute_block and not hasattr(memory, "seed")
    named = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    assert len(named) == len({*named}) and {*named} == {f.name for f in dataclasses.fields(config)}
