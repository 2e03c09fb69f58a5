"""Mixtures of experts in whole steps on the CPU device: routing, memory, ranks, files."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from llmq.base.errors import ConfigError
from llmq.checkpoint.merge import merge_adapter
from llmq.commands.cli import _run
from llmq.options.adapters import Adapters
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset, resolve_model
from llmq.plan.checks import check_machine
from llmq.run.monitor import IdleExperts
from llmq.runtime.machine import Machine
from llmq.runtime.plan_device import Work
from llmq.state.params import weight_table
from tests.data.test_document_mask import batch_of, load_with_row
from tests.formats.test_fp8 import FP8, check_gradients, first_step
from tests.harness import GPU_SPEC
from tests.models import (
    GRADIENT_RTOL,
    LOSS_RTOL,
    exported,
    hf_model,
    pieces,
    random_batch,
    torch_gradients,
    torch_loss,
    trainer_for,
)


def steps(path, count=2, **options):
    """Results and weights after steps of two micro-steps, whose plan was exact."""
    rng = np.random.default_rng(0)
    with trainer_for(path, grad_accumulation=2, **options) as trainer:
        results = [trainer.step([random_batch(rng) for _ in range(2)]) for _ in range(count)]
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights()


def test_ties_and_experts_without_a_token(tmp_path):
    """48 tokens meet one of 64 experts each, of which two are alike."""
    sizes = {"num_experts": 64, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    model = hf_model("qwen3_moe", **sizes, norm_topk_prob=False)
    with torch.no_grad():
        for layer in (0, 2):
            mlp = model.model.layers[layer].mlp
            mlp.gate.weight[3] *= 3  # one of the busiest
            for weight in (mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj):
                weight[7] = weight[3]
    model.save_pretrained(tmp_path)
    batch = random_batch(np.random.default_rng(0))
    with trainer_for(tmp_path) as trainer:
        result = trainer.step([batch])
        ours = pieces(trainer, trainer.gradients())
    loss = torch_loss(model, [batch])
    loss.backward()
    np.testing.assert_allclose(result.loss, loss.item(), rtol=LOSS_RTOL)
    theirs, idle = torch_gradients(model), 0
    assert ours.keys() == theirs.keys()
    for gradients in (ours, theirs):  # which of the two is chosen, rounding may say
        for name in [name for name in gradients if ".experts.7." in name]:
            gradients[name.replace(".7.", ".3.")] += gradients.pop(name)
        for layer in (0, 2):
            router = gradients[f"model.layers.{layer}.mlp.gate.weight"]
            router[3] += router[7]
            router[7] = 0
    for name, gradient in theirs.items():
        error = np.linalg.norm(ours[name] / result.tokens - gradient)
        assert error <= GRADIENT_RTOL * np.linalg.norm(gradient), name  # 0 where it is 0
        idle += "experts" in name and not gradient.any()
    assert idle >= 2 * 3 * (64 - 48)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4_a4b"])
def test_memory_and_recomputation_change_no_bit(name):
    path = exported(name)
    for dtype in ("fp32", "bf16"):
        want, weights = steps(path, model_dtype=dtype)
        changes = [{f"recompute_{flag}": True} for flag in ("swiglu", "norm", "ffn", "block")]
        changes[-1] |= {"offload_residual": True, "offload_opt_m": True, "offload_master": True}
        changes.append({"shard_weights": True, "shard_gradients": True, "recompute_layers": "0"})
        for change in changes:
            got, same = steps(path, model_dtype=dtype, **change)
            assert got == want, change
            assert all(np.array_equal(weights[n], same[n]) for n in weights), change


def test_branches_are_made_again_with_fp8_codes():
    path, fp8 = exported("gemma4_a4b"), FP8 | {"matmul_dtype": "e4m3", "fp8_recipe": "delayed"}
    want, weights = steps(path, **fp8)
    got, same = steps(path, **fp8, recompute_block=True)
    assert got == want
    assert all(np.array_equal(weights[n], same[n]) for n in weights)


def test_bf16_gradients_are_close_where_rounding_chooses_nothing():
    """All experts are active, as rounding could choose other experts of a few."""
    path, found = exported("qwen3_moe", num_experts_per_tok=5), []
    for dtype in ("fp32", "bf16"):
        with trainer_for(path, model_dtype=dtype) as trainer:
            result = trainer.step([random_batch(np.random.default_rng(1))])
            gradients = {n: g.astype(np.float32) for n, g in trainer.gradients().items()}
            found.append((result, gradients))
    (want, reference), (got, ours) = found
    assert abs(got.loss - want.loss) < 0.01 * want.loss
    largest = max(np.linalg.norm(g) for g in reference.values())
    for name, expected in reference.items():
        size = np.linalg.norm(expected)
        if size > 0.01 * largest:  # the bounds are the project's, of a correct bf16 step
            cosine = np.vdot(ours[name], expected) / (np.linalg.norm(ours[name]) * size)
            assert cosine >= 0.99, name
            assert abs(np.linalg.norm(ours[name]) / size - 1) <= 0.02, name


def test_sharded_ranks_compute_what_one_does():
    path, rng = exported("qwen3_moe"), np.random.default_rng(2)
    batches = [random_batch(rng) for _ in range(2)]
    with trainer_for(path, grad_accumulation=2) as one:
        want, weights = one.step(batches), one.weights()
    for level in (1, 2, 3):
        with trainer_for(path, gpus=2, zero_level=level, offload_gradients=level > 1) as two:
            got, sharded = two.step(batches), two.weights()
        # Sums in another order.
        np.testing.assert_allclose([got.loss, got.norm], [want.loss, want.norm], rtol=1e-5)
        for name, expected in weights.items():
            np.testing.assert_allclose(sharded[name], expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_goes_on_and_its_export_is_the_model(tmp_path):
    path, rng = exported("qwen3_moe"), np.random.default_rng(4)
    batches = [[random_batch(rng)] for _ in range(3)]
    with trainer_for(path) as trainer:
        trainer.step(batches[0])
        trainer.save(tmp_path / "ckpt")
        trainer.export(tmp_path / "out")
        want = [trainer.step(batch) for batch in batches[1:]]
    with trainer_for(path) as trainer:
        trainer.load(tmp_path / "ckpt")
        assert [trainer.step(batch) for batch in batches[1:]] == want
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(torch_loss(model, batches[1]).item(), want[0].loss, rtol=1e-5)


def test_losses_of_routers_are_those_of_transformers():
    """The load-balancing loss is over all layers; the z-loss is the mean square of log-sum-exps."""
    model, path = hf_model("qwen3_moe"), exported("qwen3_moe")
    batch, aux, z = random_batch(np.random.default_rng(7)), 0.3, 0.02
    with trainer_for(path, router_aux_loss=aux, router_z_loss=z) as trainer:
        result = trainer.step([batch])
        ours = pieces(trainer, trainer.gradients())
    out = model(torch.from_numpy(batch[0]).long(), output_router_logits=True)
    squares = torch.stack([each.logsumexp(-1).square().mean() for each in out.router_logits]).mean()
    loss = torch_loss(model, [batch])
    (loss + aux * out.aux_loss + z * squares).backward()
    np.testing.assert_allclose(result.loss, loss.item(), rtol=LOSS_RTOL)
    np.testing.assert_allclose(result.numbers["router_aux"], out.aux_loss.item(), rtol=1e-5)
    np.testing.assert_allclose(result.numbers["router_z"], squares.item(), rtol=1e-5)
    for name, gradient in torch_gradients(model).items():
        error = np.linalg.norm(ours[name] / result.tokens - gradient)
        assert error <= GRADIENT_RTOL * np.linalg.norm(gradient), name


def test_a_checkpoint_tells_which_experts_have_not_moved(tmp_path, capsys):
    path = exported("qwen3_moe", num_experts=64, num_experts_per_tok=1, moe_intermediate_size=16)
    with trainer_for(path) as trainer:
        trainer.step([random_batch(np.random.default_rng(0))])
        gradients = trainer.gradients()
        saved = trainer.save(tmp_path / "ckpt")
    assert _run(["check", "--trained", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for layer in (0, 2):
        name = f"model.layers.{layer}.experts_down.weight"
        idle = [e for e, gradient in enumerate(gradients[name]) if not gradient.any()]
        assert len(idle) >= 64 - 48
        assert f"  {name}: experts {', '.join(map(str, idle))}" in lines


def test_nan_in_one_document_reaches_no_other():
    """A document's rows and others' meet in experts, where BLAS may sum in another order."""
    rng, poisoned, found = np.random.default_rng(3), 7, []
    inputs, targets, starts = batch_of(rng)[:3]
    inputs[inputs == poisoned] = 8
    bad = starts == 10
    inputs[bad], targets[bad] = poisoned, -100
    for value in (0.5, np.nan):
        options = {"document_mask": True, "router_aux_loss": 0.1, "router_z_loss": 0.1}
        with trainer_for(exported("qwen3_moe"), **options) as trainer:
            load_with_row(trainer, exported("qwen3_moe"), poisoned, value)
            loss = trainer.step([(inputs, targets, starts)]).loss
            found.append((loss, trainer.gradients()["model.embed_tokens.weight"]))
    (want, _), (got, gradients) = found
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert bad.any() and np.isfinite(gradients[np.unique(inputs[~bad])]).all()
    assert np.isnan(gradients[poisoned]).any()


def test_experts_without_tokens_are_named():
    """Tokens of experts are counted over ranks, and from one look to the next."""
    path, rng, lines = exported("qwen3_moe"), np.random.default_rng(9), []
    reporter = SimpleNamespace(message=lambda line, step: lines.append(line))
    with trainer_for(path, gpus=2) as trainer:
        watch = IdleExperts(trainer, reporter, every=2)
        for step in range(4):
            result = trainer.step([random_batch(rng) for _ in range(2)])
            watch.on_step(SimpleNamespace(step=step, number=step))
        assert lines == [] and "router_busiest" in result.shown
        assert 2 / 5 <= result.numbers["router_busiest"] <= 1
        assert 0 < result.numbers["router_entropy"] <= np.log(5)
        tokens = 4 * 2 * 48
        assert watch._counts().shape == (2, 5)
        np.testing.assert_array_equal(watch._counts().sum(axis=1), 2 * tokens)
        watch.on_step(SimpleNamespace(step=5, number=5))  # without a step in between
    (line,) = lines
    assert "met 10 of 10 experts in the last 2 steps: 0 of layer 0, 1 of layer 0" in line
    assert "2 of layer 2 and 2 more; see --router-aux-loss" in line


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4_a4b"])
def test_adapters_stand_beside_frozen_experts(name):
    """Frozen experts may be codes of any format, which are decoded; the router is none of them."""
    batch = random_batch(np.random.default_rng(6), T=32)
    bases = (("fp32", "fp32"), ("nf4", "fp32"), ("mxfp4", "fp32"), ("e4m3", "bf16"))
    for base, model in (*bases, ("int8", "bf16")):
        options = {"lora_rank": 4, "lora_targets": "q,v", "base_dtype": base, "seq_len": 32}
        options |= {"model_dtype": model, "matmul_dtype": model}
        with trainer_for(exported(name), **options) as trainer:
            losses = [trainer.step([batch]).loss for _ in range(4)]
            assert trainer.usage == trainer.plan.usage
            assert not any("moe" in name or "expert" in name for name in trainer.gradients())
        assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A batch, a step of adapters of experts that have been trained, and their export."""
    folder, batch = tmp_path_factory.mktemp("adapted"), random_batch(np.random.default_rng(3))
    options = {"lora_rank": 8, "lora_targets": "q,experts", "learning_rate": 2e-2}
    with trainer_for(exported("qwen3_moe"), **options) as trainer:
        first = trainer.step([batch]).loss
        trainer.export(folder)
        again = trainer.step([batch])
        assert trainer.usage == trainer.plan.usage
        return batch, first, again, trainer.gradients(), folder


def test_gradients_of_adapters_of_experts_follow_from_those_of_the_merged_model(adapted, tmp_path):
    """d_B = scale * d_W @ A^T, and d_A = scale * B^T @ d_W."""
    batch, first, again, gradients, folder = adapted
    assert again.loss < first - 0.2
    merge_adapter(str(exported("qwen3_moe")), folder, tmp_path / "merged")
    with trainer_for(tmp_path / "merged") as trainer:
        assert trainer.step([batch]).loss == pytest.approx(again.loss, rel=1e-5)
        whole = pieces(trainer, trainer.gradients())
    tensors, prefix = load_file(folder / "adapter_model.safetensors"), "base_model.model."
    model = resolve_model(str(exported("qwen3_moe")), from_scratch=False)[0]
    table = weight_table(model, 1, Adapters(rank=8, targets=("q", "experts")))
    found = {
        part.name: gradients[param.name][part.start : part.stop]
        for slab in table
        for param in slab.params
        for part in param.hf
        if param.of_adapter
    }
    assert sum("experts" in name for name in found) == 2 * 2 * 3 * 5
    for name in [name for name in found if name.endswith("lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        d_w = whole[f"{module.removeprefix(prefix)}.weight"]
        a, b = (tensors[f"{module}.lora_{x}.weight"] for x in "AB")
        for x, want in (("A", 2 * b.T @ d_w), ("B", 2 * d_w @ a.T)):
            error = np.linalg.norm(found[f"{module}.lora_{x}.weight"] - want)
            assert error <= 1e-3 * np.linalg.norm(want), (module, x)  # W is rounded when merged


def test_peft_finds_adapters_of_experts_and_they_go_on(adapted):
    batch, _, again, _, folder = adapted
    model = transformers.AutoModelForCausalLM.from_pretrained(exported("qwen3_moe"))
    model = peft.PeftModel.from_pretrained(model, folder)
    np.testing.assert_allclose(torch_loss(model, [batch]).item(), again.loss, rtol=1e-5)
    with trainer_for(exported("qwen3_moe"), adapter=str(folder), lora_dropout=0.0) as trainer:
        assert trainer.step([batch]).loss == pytest.approx(again.loss, rel=1e-6)


def test_adapters_of_experts_change_no_bit_with_memory_or_ranks():
    options = {"lora_rank": 8, "lora_targets": "v,experts", "model_dtype": "bf16"}
    want, weights = steps(exported("qwen3_moe"), **options)
    for change in ({"recompute_block": True}, {"shard_weights": True, "recompute_ffn": True}):
        got, same = steps(exported("qwen3_moe"), **options, **change)
        assert got == want, change
        assert all(np.array_equal(weights[n], same[n]) for n in weights), change


@pytest.mark.parametrize(
    "name, options",
    [
        ("qwen3_moe", {"gradient_dtype": "e5m2"}),
        ("qwen2_moe", {"fp8_recipe": "delayed"}),
        ("gpt_oss", {"fp8_recipe": "delayed"}),
        ("gpt_oss", {}),
        ("gemma4_a4b", {"fp8_recipe": "delayed"}),
    ],
)
def test_fp8_gradients_of_experts_are_close_to_f32(tmp_path, name, options):
    """All experts are active, or rounding would choose others. test_fp8.py says why the bounds."""
    active = 8 if name == "gpt_oss" else 5
    field = "top_k_experts" if name == "gemma4_a4b" else "num_experts_per_tok"
    hf_model(name, **{field: active}).save_pretrained(tmp_path)
    want, reference = first_step(tmp_path, 24, ())
    got, ours = first_step(tmp_path, 24, tuple((FP8 | options).items()))
    assert abs(got.loss - want.loss) < 0.01 * want.loss
    # The direction of so few elements is chance.
    reference = {n: g for n, g in reference.items() if not n.endswith(("q_norm.weight", "scale"))}
    check_gradients(ours, reference, 0.98)


@pytest.mark.parametrize(
    "options",
    [
        {"fp8_recipe": "delayed"},
        {"lora_rank": 8, "lora_targets": "q,experts", "base_dtype": "e4m3"},
    ],
    ids=["trained", "adapters"],
)
def test_fp8_experts_change_no_bit_with_memory_or_ranks(options):
    layers = {"num_hidden_layers": 4, "layer_types": ("full_attention",) * 4}  # more than slots
    path, options = exported("qwen2_moe", **layers), FP8 | options
    want, weights = steps(path, **options)
    changes = [{"recompute_swiglu": True}, {"shard_weights": True, "recompute_ffn": True}]
    for change in changes:
        got, same = steps(path, **options, **change)
        assert got == want, change
        assert all(np.array_equal(weights[n], same[n]) for n in weights), change


def test_fp8_experts_need_a_gpu_that_has_their_products():
    model, config = preset("tiny-qwen3-moe"), TrainConfig(**FP8).normalized()
    for capability in (89, 90, 120):
        spec = replace(GPU_SPEC, capability=capability)
        check_machine(config, model, Machine(kind="cuda", spec=spec, note=None))
    spec = replace(GPU_SPEC, name="B200", capability=100)
    with pytest.raises(ConfigError, match="no e4m3 product for experts on B200: use bf16"):
        check_machine(config, model, Machine(kind="cuda", spec=spec, note=None))


def test_experts_multiply_codes_forward_and_back():
    with trainer_for(exported("qwen3_moe"), **FP8) as trainer:
        (micro_step, _), *_ = trainer.plan.micro_steps
    kinds = [work.kind.name for work in micro_step if isinstance(work, Work)]
    grouped = Counter(kind.split("/")[0] for kind in kinds if kind.endswith("/grouped"))
    assert grouped == {"matmul_fp8": 2 * 4, "matmul": 2 * 2}  # of two layers


@pytest.mark.parametrize(
    "options, message",
    [
        ({"matmul-dtype": "int8"}, "no int8 product for experts: use bf16"),
        (
            {"matmul-dtype": "e4m3", "fp8-recipe": "delayed", "mlp-dtype": "e4m3"},
            "--mlp-dtype: products of experts write no codes",
        ),
        ({"lora-rank": 2, "lora-targets": "up"}, "Qwen3MoeForCausalLM has no up"),
        (
            {"lora-rank": 4, "lora-targets": "experts"},
            "adapters of experts need a multiple of 8, got 4",
        ),
        (
            {"lora-rank": 8, "lora-targets": "q,experts", "lora-dropout": 0.1},
            "--lora-dropout: adapters of experts have none",
        ),
    ],
)
def test_what_experts_lack_is_refused(options, message):
    options |= {"model": "tiny-qwen3-moe", "from-scratch": True}
    with pytest.raises(ConfigError, match=message):
        make_config(options).normalized().validate_with(preset("tiny-qwen3-moe"))
