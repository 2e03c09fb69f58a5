"""Models that are kept as codes beside adapters: the same bits wherever they are, and little memory
while they are read."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import peft
import pytest
from safetensors.numpy import load_file, save_file

from llmq.base.errors import ConfigError
from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.merge import as_kept, merge_adapter
from llmq.options.cards import card_of
from llmq.options.conditions import Ranks
from llmq.options.options import TrainConfig
from llmq.options.presets import preset, resolve_model
from llmq.options.rules import RULES
from llmq.plan.checks import check_machine
from llmq.plan.estimate import Planner
from llmq.plan.placement_table import placement_table
from llmq.plan.plan import make_plan
from llmq.run.sampling import open_model
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.runtime.machine import Machine
from llmq.state.params import weight_table
from llmq.state.placement import place, table_of
from tests.bases import block_weights
from tests.models import exported, hf_model, random_batch, torch_loss, trainer_for

BF16 = {"model_dtype": "bf16"}
FP8 = BF16 | {"matmul_dtype": "e4m3"}
# Formats of the base and of products.
KINDS = {
    "e4m3": {"base_dtype": "e4m3"},
    "e4m3 fp8": {"base_dtype": "e4m3"} | BF16,
    "e4m3 delayed": {"base_dtype": "e4m3", "fp8_recipe": "delayed"} | FP8,
    "int8": {"base_dtype": "int8"},
    "int8 int8": {"base_dtype": "int8"} | BF16,
    "nf4": {"base_dtype": "nf4"},
    "nf4 bf16": {"base_dtype": "nf4"} | BF16,
    "nf4 fp8": {"base_dtype": "nf4"} | FP8,
    "nf4 int8": {"base_dtype": "nf4", "matmul_dtype": "int8"} | BF16,
    "nvfp4 bf16": {"base_dtype": "nvfp4"} | BF16,
    "e4m3-blocks bf16": {"base_dtype": "e4m3-blocks"} | BF16,
}
STREAMED = {"shard_weights": True, "offload_master": True}


@cache
def batches(count: int = 8) -> list:
    rng = np.random.default_rng(0)
    return [random_batch(rng) for _ in range(count)]


def run(name: str = "qwen3", accumulation: int = 2, **options):
    """Losses of three steps, and the weights that were trained."""
    shared = {"lora_rank": 3, "lora_dropout": 0.25, "learning_rate": 1e-2}
    shared |= {"grad_accumulation": accumulation}
    with trainer_for(exported(name), **shared | options) as trainer:
        found = [trainer.step(batches()[2 * i : 2 * i + 2]).loss for i in range(3)]
        assert trainer.usage == trainer.plan.usage
        return found, trainer.weights()


@cache
def plain(kind: str):
    return run(**KINDS[kind])


def assert_same(found, want) -> None:
    assert found[0] == want[0]
    for name, value in want[1].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)


MEMORY = {
    "host": STREAMED,
    "block": {"recompute_block": True, "offload_residual": True},
    "parts": {"recompute_ffn": True, "recompute_qkv": True, "recompute_norm": True},
}
FP8_ONLY = {
    "transposed": {"keep_transposed": False, "recompute_att": True, "recompute_swiglu": True},
}


@pytest.mark.parametrize(
    "kind, options",
    [
        ("e4m3", "host"),
        ("nf4", "host"),
        ("nf4 bf16", "block"),
        ("nf4 bf16", "parts"),
        ("int8", "host"),
        ("nf4 int8", "block"),
        ("nvfp4 bf16", "host"),
        ("e4m3-blocks bf16", "host"),
        *(("int8 int8", name) for name in MEMORY | FP8_ONLY),
        ("nf4 fp8", "host"),
        ("nf4 fp8", "transposed"),
        *(("e4m3 fp8", name) for name in MEMORY | FP8_ONLY),
        *(("e4m3 delayed", name) for name in ("block", "parts", "transposed")),
    ],
)
def test_memory_options_change_no_bit(kind, options):
    assert_same(run(**KINDS[kind], **(MEMORY | FP8_ONLY)[options]), plain(kind))


def test_outliers_are_multiplied_as_they_are(monkeypatch):
    """Without them a few large features would take the precision of all others."""
    losses = {}
    for name, threshold in (("codes alone", 1e9), ("with outliers", 6.0), ("all", 0.0)):
        monkeypatch.setattr("llmq.ops.quantize.quantize_int8.THRESHOLD", threshold)
        losses[name] = run(**KINDS["int8 int8"])[0][0]
    exact = run(base_dtype="int8", matmul_dtype="bf16", **BF16)[0][0]
    # Half of the 64 to 160 columns and more are beyond 0: then all of qkv's and up's inputs are.
    assert abs(losses["all"] - exact) < abs(losses["codes alone"] - exact)
    assert losses["with outliers"] == pytest.approx(exact, rel=1e-3)  # codes have 8 bits


@pytest.mark.parametrize("name", ["gpt2", "olmo2", "phi3", "gemma3", "qwen3_5", "granitemoehybrid"])
def test_fp8_of_other_architectures(name):
    """With norms elsewhere, other activations: what is computed again is the same."""
    kind = KINDS["e4m3 fp8"] | {"lora_targets": "all"}
    found = run(name, **kind)
    assert_same(run(name, **kind, recompute_block=True), found)
    exact = run(name, base_dtype="e4m3")[0]
    # Products of codes with 4 significant bits, beside exact ones of the same weights.
    assert found[0] == pytest.approx(exact, rel=0.01)
    assert found[0] != exact


@pytest.mark.parametrize(
    "kind, options",
    [
        ("nf4 bf16", {}),
        ("nf4 bf16", {"zero_level": 3}),
        ("nvfp4 bf16", {"zero_level": 3}),
        ("e4m3-blocks bf16", {"zero_level": 3, "offload_master": True}),
        ("nf4 fp8", {"zero_level": 3, "offload_master": True}),
        ("e4m3 fp8", {"zero_level": 3, "memcpy_all_gather": True, "mirror_weights": True}),
        ("e4m3 fp8", {"keep_transposed": False}),
        ("int8 int8", {"zero_level": 3}),
    ],
)
def test_ranks_have_the_same_weights(kind, options):
    """Bit for bit those of one rank; sums of the ranks' gradients are in another order."""
    options = KINDS[kind] | options
    with trainer_for(exported("qwen3"), lora_rank=3, gpus=2, **options) as trainer:
        several = block_weights(trainer)
        losses = [trainer.step(batches()[2 * i : 2 * i + 2]).loss for i in range(2)]
        assert trainer.usage == trainer.plan.usage
    with trainer_for(exported("qwen3"), lora_rank=3, **KINDS[kind], grad_accumulation=2) as trainer:
        alone = {p.name: values for p, values in block_weights(trainer).items()}
        want = [trainer.step(batches()[2 * i : 2 * i + 2]).loss for i in range(2)]
    assert losses == pytest.approx(want, rel=1e-3)  # adapters in BF16
    assert losses[0] == pytest.approx(want[0], rel=1e-6)  # two F32 sums
    for param, values in several.items():
        np.testing.assert_array_equal(values, alone[param.name], err_msg=param.name)


def test_weights_are_those_of_the_codes():
    """The weights that a block computes with are those that `merge` makes of the files."""
    for base in ("e4m3", "e4m3-blocks", "int8", "nf4", "nvfp4"):
        with (
            trainer_for(exported("phi3"), lora_rank=3, base_dtype=base) as trainer,
            HfWeights(exported("phi3")) as files,
        ):
            read = as_kept(files.read, base)
            for param, values in block_weights(trainer).items():
                np.testing.assert_array_equal(values, read(param), err_msg=param.name)
                original = files.read(param)
                assert 0.98 < np.corrcoef(values.ravel(), original.ravel())[0, 1] < 1


def test_fp8_codes_of_nf4():
    """They are as near as E4M3 can be, with one scale for the modules of a matrix: none is
    clamped."""
    kind = KINDS["nf4 fp8"]
    with (
        trainer_for(exported("qwen3"), lora_rank=3, **kind) as trainer,
        HfWeights(exported("qwen3")) as files,
    ):
        read = as_kept(files.read, "nf4")
        for param, values in block_weights(trainer).items():
            want = read(param)
            # 4 significant bits, and below 2^-6 of the scale's 448 steps of 2^-9.
            bound = 2.0**-4 * np.abs(want) + 2.0**-10 * np.abs(want).max() / 448
            assert (np.abs(values - want) <= bound).all(), param.name


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gpt2", "qwen3_next"])
def test_parts_of_tensors(name):
    """The values read of a few rows are those that are there of the whole, also where Hugging Face
    has it transposed, its halves swapped, or by head."""
    with trainer_for(exported(name), lora_rank=2) as trainer, HfWeights(exported(name)) as files:
        blocks = [s for s in weight_table(trainer.model) if s.is_block]
        for param in (p for slab in blocks for p in slab.params):
            whole, third = files.read(param).reshape(-1), param.size // 3
            edges = [0, 1, third, 2 * third + 5, param.size]
            parts = [files.elements(param, *e) for e in pairwise(edges)]
            np.testing.assert_array_equal(np.concatenate(parts), whole, err_msg=param.name)


def test_loading_needs_little_memory(tmp_path, monkeypatch):
    """Not the model, and not one of its tensors."""
    config = {"hidden_size": 128, "intermediate_size": 2048, "num_hidden_layers": 5}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config |= {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    config |= {"model_type": "qwen2", "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {}
    model, _ = resolve_model(str(tmp_path), from_scratch=True)
    for param in (p for slab in weight_table(model) for p in slab.params):
        for part in param.hf:
            shapes[part.name] = (part.stop - part.start, *param.shape[1:])
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(0, 0.02, s).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    total, largest = (f(t.nbytes for t in tensors.values()) for f in (sum, max))
    del tensors
    monkeypatch.setattr("llmq.formats.storage.PIECE", 1 << 13)
    monkeypatch.setattr("llmq.checkpoint.safetensors_file.PIECE", 1 << 13)
    for kind in ("e4m3 fp8", "int8 int8", "nf4 bf16", "nvfp4 bf16"):
        with trainer_for(tmp_path, lora_rank=2, seq_len=16, **KINDS[kind]) as trainer:
            tracemalloc.start()
            try:
                trainer.load_weights()
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert peak < largest / 2 < total / 20, kind


def test_resume_and_merge(tmp_path, capsys):
    options = KINDS["nf4"] | {"lora_rank": 4, "learning_rate": 1e-2, "train": "norms"}
    base = str(exported("qwen3"))
    with trainer_for(base, **options) as trainer:
        for batch in batches()[:2]:
            trainer.step([batch])
        path = trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "adapter")
        want = [trainer.step([batch]).loss for batch in batches()[2:4]]
    stored = load_file(next(path.glob("weights.shard_000*")))
    assert all("lora" in name or "norm" in name for name in stored)
    with trainer_for(base, **options) as trainer:
        trainer.load(path)
        assert [trainer.step([batch]).loss for batch in batches()[2:4]] == want
    said = json.loads((tmp_path / "adapter" / "llmq.json").read_text())
    assert said["base_dtype"] == "nf4"

    # In the base as it was in training, or in the original: as PEFT adds it to either.
    theirs = peft.PeftModel.from_pretrained(hf_model("qwen3"), tmp_path / "adapter")
    original = torch_loss(theirs, [batches()[2]]).item()
    for name, kept, loss in (("out", None, want[0]), ("plain", "fp32", original)):
        merge_adapter(base, tmp_path / "adapter", tmp_path / name, "fp32", kept)
        with trainer_for(tmp_path / name) as trainer:
            assert trainer.step([batches()[2]]).loss == pytest.approx(loss, abs=2e-6)  # F32
    assert abs(original - want[0]) > 1e-4
    with (
        open_model(base, tmp_path / "adapter") as (config, read, _),
        open_model(str(tmp_path / "out")) as (_, merged, _),
    ):
        for param in (p for slab in weight_table(config) for p in slab.params):
            np.testing.assert_array_equal(read(param), merged(param), err_msg=param.name)

    capsys.readouterr()
    with trainer_for(base, adapter=tmp_path / "adapter") as trainer:  # beside the original
        assert "was trained beside a model in nf4, this run has it" in capsys.readouterr().err
        assert trainer.step([batches()[2]]).loss == pytest.approx(original, abs=2e-6)  # F32
    with trainer_for(base, adapter=tmp_path / "adapter", base_dtype="nf4") as trainer:
        assert "was trained beside" not in capsys.readouterr().err
        assert trainer.step([batches()[2]]).loss == want[0]


def test_random_weights():
    """Made piece by piece: those of a model that is kept as it is, as codes."""
    options = {"from_scratch": True, "lora_rank": 2, "model": "tiny", "seq_len": 16}
    with trainer_for("tiny", **options) as trainer:
        want = {p.name: values for p, values in block_weights(trainer).items()}
    with trainer_for("tiny", **options, base_dtype="nf4") as trainer:
        read = as_kept(lambda param: want[param.name], "nf4")
        for param, values in block_weights(trainer).items():
            np.testing.assert_array_equal(values, read(param), err_msg=param.name)


def test_placements_and_plans():
    model = preset("tiny")
    options = {"model": "tiny", "from_scratch": True, "lora_rank": 8, **BF16}

    def rows(world, **more):
        config = TrainConfig(**options, **more).normalized()
        table = placement_table(place(config.for_step, table_of(config, model, world), world))
        return next(line.split(maxsplit=2)[2] for line in table if "layers" in line)

    assert rows(1, base_dtype="nf4").startswith("bf16, in slots  nf4  ")
    assert rows(1, base_dtype="e4m3").startswith("e4m3  e4m3  ")
    assert rows(1, base_dtype="nf4", **STREAMED).startswith("bf16, in slots  nf4 shard, pinned")
    assert rows(2, base_dtype="e4m3", zero_level=3).startswith("e4m3, in slots  e4m3 shard  ")

    bytes_of = {}
    for base in (None, "e4m3", "e4m3-blocks", "int8", "nf4", "nvfp4"):
        config = TrainConfig(**options, base_dtype=base).normalized()
        bytes_of[base] = make_plan(config, model, HOST_SPEC).usage.device_bytes
        planner = Planner(model, HOST_SPEC, "native", card_of(HOST_SPEC))
        estimate, exact = planner.estimate(config).device, planner.exact(config).device
        assert estimate == pytest.approx(exact, abs=1 << 20)  # alignment
    assert bytes_of["nf4"] < bytes_of[None]

    def work(**more):
        config = TrainConfig(**options, base_dtype="nf4", **more).normalized()
        return make_plan(config, model, HOST_SPEC).usage.categories["device"]["Weights"]

    block = next(slab for slab in weight_table(model) if slab.is_block)
    assert work(**STREAMED) - work() == 2 * block.size  # two slots, and one


def test_what_has_no_effect_or_cannot_be():
    config = TrainConfig(lora_rank=4, base_dtype="nf4", keep_transposed=False, **FP8).normalized()
    assert RULES.idle(config, ranks=Ranks(1)) == [
        "--no-keep-transposed has no effect with --base-dtype nf4: it is implied"
    ]
    config = TrainConfig(lora_rank=4, base_dtype="nf4", keep_transposed=False).normalized()
    assert "--no-keep-transposed has no effect without --matmul-dtype e4m3" in RULES.idle(config)
    int8 = TrainConfig(lora_rank=4, base_dtype="int8", keep_transposed=False).normalized()
    decodes = replace(int8, matmul_dtype="bf16", gradient_dtype="bf16")
    assert RULES.idle(decodes) == ["--no-keep-transposed has no effect without --matmul-dtype int8"]
    assert RULES.idle(replace(int8, keep_transposed=True, zero_level=3), ranks=Ranks(1)) == [
        "--zero-level 3 has no effect with one GPU without --offload-master and with --lora-rank: "
        "blocks have no gradients but those of their adapters"
    ]
    assert not RULES.idle(int8) and not RULES.idle(int8, ranks=Ranks(1))
    assert RULES.idle(replace(int8, shard_weights=True, offload_master=True), ranks=Ranks(1)) == [
        "--no-keep-transposed has no effect with --shard-weights: it is implied"
    ]
    shape = {"hidden_size": 40, "num_heads": 5, "num_kv_heads": 1, "head_dim": 4}
    config = TrainConfig(lora_rank=4, base_dtype="nf4", seq_len=16).normalized()
    with pytest.raises(ConfigError, match="nf4 needs matrices of multiples of 64 elements"):
        config.validate_with(replace(preset("tiny"), **shape))
    config = replace(config, base_dtype="e4m3-blocks")
    with pytest.raises(ConfigError, match=r"multiples of 16 elements: a row of .* has 40"):
        config.validate_with(replace(preset("tiny"), **shape | {"num_heads": 4}))
    ampere = DeviceSpec(
        name="RTX 3090", capability=86, num_sms=82, memory=24 << 30, library_workspace=4 << 20
    )
    config = TrainConfig(lora_rank=4, base_dtype="e4m3", **BF16).normalized()
    with pytest.raises(ConfigError, match=r"needs compute capability 8.9.*: use --base-dtype int8"):
        check_machine(config, preset("tiny"), Machine(kind="cuda", spec=ampere, note=None))
