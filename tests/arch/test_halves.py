"""An architecture declares all that others need: a made-up one with experts, everywhere."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmq.arch import ARCHITECTURES
from llmq.base.errors import ConfigError
from llmq.checkpoint.merge import as_kept, merged_reader
from llmq.checkpoint.peft_export import target_modules
from llmq.comm.connect import connect
from llmq.comm.options import CommOptions
from llmq.model.halves import HALVES
from llmq.options.adapters import Adapters, adapted_matrices, adapters_of
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.plan.plan import make_plan
from llmq.plan.sol import flops_per_token
from llmq.run.diagnose import _place
from llmq.run.trainer import Trainer
from llmq.runtime.device import HOST_SPEC, MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.state.params import parameter_count, weight_table
from llmq.state.placement import place
from llmq.state.weights import Weights
from tests.mixture import ACTIVE, EXPERTS, ExpertsHalf, Mixture

B, T, V, WIDTH = 2, 16, 257, 48
FIELDS = {"hidden_size": 64, "intermediate_size": 112, "num_layers": 4, "max_positions": 64}
DENSE = replace(preset("tiny"), **FIELDS)
C = DENSE.hidden_size


@pytest.fixture(autouse=True)
def mixture(monkeypatch):
    """The model: layers 1 and 3 have experts."""
    monkeypatch.setitem(ARCHITECTURES, Mixture.name, Mixture(WIDTH))
    monkeypatch.setitem(HALVES, "mixture", ExpertsHalf)
    windows = {"sliding_window": 8, "windowed_layers": (False, True, False, True)}
    return replace(DENSE, architecture=Mixture.name, **windows).validate()


@pytest.fixture
def folder(mixture, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(mixture.to_hf()))
    return tmp_path / "model"


def trainer_of(folder, **options):
    defaults = {
        "model": str(folder), "from_scratch": not (folder / "model.safetensors").exists(),
        "device": "cpu", "gpus": 1, "batch_size": B, "seq_len": T, "grad_accumulation": 2,
        "steps": 10, "learning_rate": 1e-2, "model_dtype": "fp32", "tune": False,
    }  # fmt: skip
    return Trainer(**(defaults | options))


def batches(count=2):
    tokens = np.random.default_rng(1).integers(0, V, (count, B, T + 1)).astype(np.int32)
    return [(np.ascontiguousarray(x[:, :-1]), np.ascontiguousarray(x[:, 1:])) for x in tokens]


def losses(trainer, steps=3):
    return [trainer.step(batches()).loss for _ in range(steps)]


# -- what follows from the declaration -----------------------------------------------------------


def test_weight_table_slabs_and_names_at_hugging_face(mixture):
    table = {slab.name: slab for slab in weight_table(mixture, shards=2)}
    dense = {slab.name: slab for slab in weight_table(DENSE, shards=2)}
    for layer in (0, 2):
        name = f"layers.{layer}"
        assert [p.key for p in table[name].params] == ["qkv", "o", "up", "down"]
        assert table[name].size == dense[name].size
    up, down = table["layers.1"].params[2:]
    assert (up.key, up.shape, up.init) == ("many_up", (EXPERTS, WIDTH, C), "normal")
    assert (down.key, down.shape, down.init) == ("many_down", (EXPERTS, C, WIDTH), "residual")
    assert up.decay and up.rows == EXPERTS * WIDTH and up.columns == C
    assert up.name == "model.layers.1.moe.many_up.weight"
    names = [f"model.layers.1.moe.experts.{i}.up_proj.weight" for i in range(EXPERTS)]
    assert [(part.name, part.start, part.stop) for part in up.hf] == [
        (name, i * WIDTH, (i + 1) * WIDTH) for i, name in enumerate(names)
    ]
    (scale,) = [p for p in table["vectors"].params if p.key == "moe_scale" and p.block[-1] == "1"]
    assert scale.shape == (EXPERTS,) and not scale.decay and scale.init == "one"
    only_norms = Adapters(rank=2, targets=("o",), train=("norms",))
    norms = {slab.name: slab for slab in weight_table(mixture, 1, only_norms)}["norms"]
    assert "moe_scale" not in {p.key for p in norms.params}


def test_planned_bytes(mixture):
    """The plan has as many weights, gradients and moments as there are parameters, aligned."""
    options = TrainConfig(
        model_dtype="fp32", batch_size=B, seq_len=T, device="cpu", gpus=1, steps=1
    ).normalized()
    experts = 2 * (2 * EXPERTS * WIDTH * C + EXPERTS)
    mlps = 2 * 3 * DENSE.intermediate_size * C
    assert parameter_count(mixture) - parameter_count(DENSE) == experts - mlps
    sizes = {slab.name: slab.size for slab in weight_table(mixture)}
    found = make_plan(options, mixture, HOST_SPEC).usage.categories["device"]
    for category in ("Weights", "Gradients", "Adam M", "Adam V"):
        assert found[category] == 4 * sum(sizes.values()), category


def test_speed_of_light_counts_what_a_token_meets(mixture):
    more = ACTIVE * 2 * WIDTH * C - 3 * DENSE.intermediate_size * C
    counts = [flops_per_token(model, T).blocks for model in (mixture, DENSE)]
    assert counts[0] - counts[1] == 6 * 2 * more


def test_targets_of_adapters(mixture):
    up = Adapters(rank=4, targets=("up",))
    experts = adapted_matrices(mixture, up, 1)
    assert [(m.key, m.shape) for m in experts] == [("many_up", (EXPERTS * WIDTH, C))]
    assert experts[0].modules[1] == "model.layers.1.moe.experts.1.up_proj"
    assert experts[0].spans[1] == (WIDTH, 2 * WIDTH)
    assert [m.key for m in adapted_matrices(mixture, up, 2)] == ["up"]
    adapters = Adapters(rank=4, targets=("up", "down"))
    table = {slab.name: slab for slab in weight_table(mixture, 1, adapters)}
    shapes = {(p.block, p.key): p.shape for p in table["lora_b"].params}
    assert shapes["layers.1", "many_down_b"] == (EXPERTS * C, 4)
    assert shapes["layers.2", "up_b"] == (DENSE.intermediate_size, 4)
    a = next(p for p in table["lora_a"].params if p.key == "many_down_a" and p.block == "layers.1")
    prefix = "base_model.model.model.layers.1.moe.experts"
    assert a.hf[2].name == f"{prefix}.2.down_proj.lora_A.weight"
    # Elsewhere other modules are called so, but all of them have adapters.
    assert target_modules(mixture, adapters) == ["down_proj", "up_proj"]
    with pytest.raises(ConfigError, match="--lora-rank: 49 is larger than the matrix of up_proj"):
        TrainConfig(lora_rank=49, seq_len=T).normalized().validate_with(mixture)


def test_gradients_are_looked_through_in_the_order_of_computation(mixture):
    keys = "d_moe many_down d_many_act moe_scale d_many_up many_up ln2 d_att o d_qkv qkv ln1"
    keys = keys.replace("moe_scale d_many_up", "d_many_up").split()
    places = [_place(mixture, "layers.1", key) for key in keys]
    assert places == sorted(places) and len({*places}) == len(places)
    later = _place(mixture, "layers.0", "d_mlp")
    assert places[-1] < later < _place(mixture, "layers.0", "down")


# -- codes and adapters of experts -----------------------------------------------------------------


def weights_of(model, **options):
    """Random weights as a run with these options has them, and its table."""
    config = TrainConfig(batch_size=B, seq_len=T, **options).normalized()
    table = weight_table(model, 1, adapters_of(config))
    dev = HostDevice(MemorySizes(device=1 << 23, stack=1 << 21, pinned=0))
    connect([dev], CommOptions())
    weights = Weights(dev, table, place(config.for_step, table))
    weights.init(model, seed=1)
    weights.start_micro_step(stale=False)
    return weights, {slab.name: {p.key: p for p in slab.params} for slab in table}


@pytest.mark.parametrize("streamed", [False, True])
def test_fp8_codes_of_experts(mixture, streamed):
    weights, _ = weights_of(mixture, matmul_dtype="e4m3", shard_weights=streamed)
    weights.gather("layers.1", frozenset({"many_up"}) if streamed else None)
    operand = weights.get("layers.1")["many_up"]
    codes = weights.dev.download(operand.codes).astype(np.float32)
    assert codes.shape == (EXPERTS, WIDTH, C) and np.abs(codes).max() == 448
    transposed = weights.get("layers.1", transposed=True)["many_up"].transposed
    with_transposed = weights.dev.download(transposed).astype(np.float32)
    np.testing.assert_array_equal(with_transposed, codes.transpose(0, 2, 1))
    down = weights.get("layers.1", transposed=True)["many_down"]
    values = weights.dev.download(weights.slabs["layers.1"].view(
        weights.master["layers.1"], weights.slabs["layers.1"].params[3]
    )).astype(np.float32)  # fmt: skip
    made = weights.dev.download(down.transposed).astype(np.float32).transpose(0, 2, 1)
    scale = weights.dev.download(down.scale)[0]
    np.testing.assert_allclose(made * scale, values, rtol=1 / 16, atol=scale * 2.0**-10)


@pytest.mark.parametrize("dtype", ["e4m3", "int8", "nf4"])
def test_frozen_experts_are_kept_as_codes(mixture, dtype):
    """Codes of frozen experts are equal to the codes that `llmq merge` makes of the same values."""
    weights, table = weights_of(mixture, lora_rank=2, lora_targets="q", base_dtype=dtype)
    exact, _ = weights_of(mixture, lora_rank=2, lora_targets="q", model_dtype="bf16")
    for each in (weights, exact):
        each.gather("layers.1")
    param, operand = table["layers.1"]["many_up"], weights.get("layers.1")["many_up"]
    values = exact.dev.download(exact.get("layers.1")["many_up"])
    expected = as_kept(lambda param: values, dtype)(param)
    if dtype == "nf4":  # products read it in the format of the model
        found = weights.dev.download(operand)
        np.testing.assert_array_equal(found, expected.astype(found.dtype))
        return
    codes, scale = (weights.dev.download(t) for t in (operand.codes, operand.scale))
    scale = scale.reshape(EXPERTS, WIDTH, 1) if dtype == "int8" else scale[0]
    np.testing.assert_array_equal(codes.astype(np.float32) * scale, expected)
    with_transposed = weights.dev.download(
        weights.get("layers.1", transposed=True)["many_up"].transposed
    )
    np.testing.assert_array_equal(with_transposed, codes.transpose(0, 2, 1))


def test_merged_adapters_of_experts(mixture):
    adapters, rng = Adapters(rank=2, targets=("up",)), np.random.default_rng(0)
    params = {p.name: p for slab in weight_table(mixture, 1, adapters) for p in slab.params}
    own = {p.key: p for p in params.values() if p.block == "layers.1"}
    weight, of_a, of_b = own["many_up"], own["many_up_a"], own["many_up_b"]
    values = rng.standard_normal(weight.shape).astype(np.float32)
    a, b = (rng.standard_normal(p.shape, np.float32) for p in (of_a, of_b))
    read = merged_reader(mixture, adapters, lambda p: values, {of_a: a, of_b: b}.__getitem__)
    count, scale = len(values), adapters.of("")[1]
    products = b.reshape(count, -1, 2) @ a[: 2 * count].reshape(count, 2, -1)
    np.testing.assert_allclose(read(weight), values + scale * products, atol=1e-5)  # F32


@pytest.mark.parametrize(
    "options, width, message",
    [
        ({"matmul_dtype": "e4m3"}, 40, "height of model.layers.1.moe.many_up is 40"),
        ({"lora_rank": 2, "base_dtype": "int8"}, 40, "height of .*many_up is 40"),
        ({"lora_rank": 2, "base_dtype": "nf4"}, 7, "experts.0.up_proj has 224"),
    ],
)
def test_sizes_of_experts_are_checked(mixture, monkeypatch, options, width, message):
    monkeypatch.setitem(ARCHITECTURES, Mixture.name, Mixture(width))
    # Another model for each width: what a model declares is remembered.
    model = replace(mixture, hidden_size=32, vocab_size=V - width)
    with pytest.raises(ConfigError, match=message):
        TrainConfig(batch_size=B, seq_len=T, **options).normalized().validate_with(model)


# -- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_block": True},
        {"recompute_ffn": True, "recompute_norm": True},
        {"shard_weights": True, "shard_gradients": True},
    ],
)
def test_bits_do_not_depend_on_memory(folder, options):
    with trainer_of(folder) as trainer:
        expected = losses(trainer)
    with trainer_of(folder, **options) as trainer:
        assert losses(trainer) == expected


def test_two_sharded_ranks_compute_the_same(folder):
    with trainer_of(folder) as trainer:
        expected = losses(trainer)
    options = {"gpus": 2, "zero_level": 3, "grad_accumulation": 1}
    with trainer_of(folder, **options) as trainer:
        np.testing.assert_allclose(losses(trainer), expected, rtol=1e-5)  # sums in another order


def test_gradients_through_files(folder, tmp_path):
    """The loss of the exported model falls along a matrix's gradient as much as this says."""
    with trainer_of(folder, learning_rate=0.0) as trainer:
        trainer.step(batches())
        gradient = trainer.gradients()["model.layers.1.moe.many_up.weight"][1]
        trainer.export(tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.moe.experts.1.up_proj.weight"
    assert tensors[name].shape == (WIDTH, C)
    direction, found = gradient / np.linalg.norm(gradient), []
    for step in (0.1, -0.1):
        moved = tensors | {name: (tensors[name] + step * direction).astype(np.float32)}
        save_file(moved, path, {"format": "pt"})
        with trainer_of(tmp_path / "out", learning_rate=0.0) as trainer:
            found.append(trainer.step(batches()).loss * 2 * B * T)
    slope = np.linalg.norm(gradient)  # of the sum of losses
    assert slope > 0
    # The third derivative counts, and F32 losses of about 5.5 have errors of 1e-6.
    np.testing.assert_allclose((found[0] - found[1]) / 0.2, slope, rtol=0.02)


def test_a_checkpoint_goes_on(folder, tmp_path):
    with trainer_of(folder, checkpoint_dir=str(tmp_path / "c")) as trainer:
        losses(trainer, 2)
        saved = trainer.save(tmp_path / "first")
        expected = losses(trainer, 2)
    with trainer_of(folder, checkpoint_dir=str(tmp_path / "d")) as trainer:
        trainer.load(saved)
        assert losses(trainer, 2) == expected


def test_decoding_is_what_training_computes(folder, mixture, tmp_path):
    """The tokens of a text, one after another, have the loss of the whole sequence."""
    prompt = batches(1)[0][0][0, :5].tolist()
    with trainer_of(folder, batch_size=1, grad_accumulation=1) as trainer:
        ((found,),) = trainer.generate([prompt], temperature=0)
        text = np.array([*prompt, *found.ids], np.int32)
        inputs, targets = np.zeros((1, T), np.int32), np.full((1, T), -100, np.int32)
        inputs[0, : len(text) - 1], targets[0, 4 : len(text) - 1] = text[:-1], text[5:]
        expected = trainer.step([(inputs, targets)]).loss
    np.testing.assert_allclose(-found.logprobs.mean(), expected, rtol=1e-5)  # another order
