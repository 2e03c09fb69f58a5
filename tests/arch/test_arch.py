"""Architectures whose blocks or files differ from the others', in whole steps on the CPU device."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from llmq.arch import ARCHITECTURES
from llmq.base.dtypes import E4M3
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.options.rules import RULES
from tests.covering import pairwise
from tests.models import VOCAB, exported, random_batch, torch_loss, trainer_for
from tests.project.test_layout import PACKAGE, modules

JIT = {"model_dtype": "bf16", "matmul_dtype": "e4m3"}
FORMATS = {
    "fp32": {},
    "bf16": {"model_dtype": "bf16"},
    "jit": JIT,
    "delayed": JIT | {"fp8_recipe": "delayed", "head_dtype": "e4m3", "seq_len": 32},
}
FLAGS = ("swiglu", "norm", "ffn", "qkv", "att", "block")
CHANGES = {f"recompute_{flag}": {f"recompute_{flag}": True} for flag in FLAGS}
CHANGES["offload"] = {"recompute_block": True, "offload_residual": True, "recompute_layers": "0"}
MODELS = ("olmo2", "phi3", "gemma3", "gemma4", "gemma4_e2b", "qwen3_5", "granitemoehybrid")


@pytest.fixture(params=MODELS)
def path(request):
    return exported(request.param)


def run(path, **options):
    """Results and weights after two steps of two micro-steps."""
    rng, T = np.random.default_rng(0), options.get("seq_len", 24)
    with trainer_for(path, grad_accumulation=2, **options) as trainer:
        results = [trainer.step([random_batch(rng, T=T) for _ in range(2)]) for _ in range(2)]
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights()


@cache
def kept(architecture, name):
    """A run that recomputes nothing."""
    return run(exported(architecture), **FORMATS[name])


@pytest.mark.parametrize(
    ("architecture", "name", "change"),
    pairwise(
        architecture=(*MODELS, "granite", "nemotron_h"), name=tuple(FORMATS), change=tuple(CHANGES)
    ),
)
def test_recompute_and_offload_are_bitwise_equal(architecture, name, change):
    want, weights = kept(architecture, name)
    got, same = run(exported(architecture), **(FORMATS[name] | CHANGES[change]))
    assert got == want
    assert all(np.array_equal(weights[n], same[n]) for n in weights)


def first_step(path, T, **options):
    """The loss of a step, and its gradients."""
    with trainer_for(path, seq_len=T, **options) as trainer:
        result = trainer.step([random_batch(np.random.default_rng(1), T=T)])
        return result.loss, {n: g.astype(np.float32) for n, g in trainer.gradients().items()}


def noise(gradients, reference):
    """The largest square of what gradients add to the reference's direction, relative to it.
    Matrices alone count: vectors have so few elements that their direction is chance."""
    squares = []
    largest = max(np.linalg.norm(g) for g in reference.values())
    for name, expected in reference.items():
        size, gradient = np.linalg.norm(expected), gradients[name]
        if size > 0.02 * largest and expected.ndim > 1:
            cosine = np.vdot(gradient, expected) / (np.linalg.norm(gradient) * size)
            assert cosine > 0, name
            squares.append(1 / cosine**2 - 1)
    return max(squares)


@pytest.mark.parametrize("name", [*FORMATS, "int8"])
def test_factors_are_in_every_format(name):
    """Granite's residual multiplier is in the gradients of all matrices, forward and backward: they
    have the size and the direction of those in F32. Its embedding drowns errors of blocks, so that
    it is not compared with rounded matrices, as others are below."""
    formats = FORMATS | {"int8": {"model_dtype": "bf16", "matmul_dtype": "int8"}}
    options = {key: value for key, value in formats[name].items() if key != "seq_len"}
    loss, reference = first_step(exported("granite"), 32)
    got, ours = first_step(exported("granite"), 32, **options)
    assert abs(got - loss) < 0.01 * loss
    for key, expected in reference.items():
        if expected.ndim == 2:
            a, b = ours[key].ravel(), expected.ravel()
            size = np.linalg.norm(a) / np.linalg.norm(b)
            assert abs(size - 1) < 0.05, (key, size)
            assert a @ b > 0.95 * np.linalg.norm(a) * np.linalg.norm(b), key


def with_rounded_matrices(path, out):
    """The model, its blocks' matrices as E4M3 codes and a scale would have them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "layers." in name:
            scale = 448 / weight.detach().abs().max()
            codes = (weight.detach() * scale).numpy().astype(E4M3.numpy)
            weight.data = torch.from_numpy(codes.astype(np.float32)) / scale
    model.save_pretrained(out)
    return out


def noise_of_transformers(path, T):
    """Return the noise of gradients in BF16 on the batch of `first_step`."""
    batches, found = [random_batch(np.random.default_rng(1), T=T)], []
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        torch_loss(model, batches).backward()
        found.append({name: p.grad.float().numpy() for name, p in model.named_parameters()})
    return noise(found[1], found[0])


@pytest.mark.parametrize("name", ["bf16", "jit", "delayed"])
def test_gradients_are_close_to_f32(path, name, tmp_path):
    """How much of an error reaches the gradients is a property of the model.

    Where norms follow the products (OLMo 2, Gemma 3), a small embedding does not drown their
    errors, and the softmax of large scores makes more of those of queries and keys. So E4M3 is
    compared with nothing but rounded matrices, in F32.
    """
    T = FORMATS[name].get("seq_len", 24)
    loss, reference = first_step(path, T)
    options = {key: value for key, value in FORMATS[name].items() if key != "seq_len"}
    got, ours = first_step(path, T, **options)
    assert abs(got - loss) < 0.01 * loss
    if name == "bf16":
        assert noise(ours, reference) < 1.5 * noise_of_transformers(path, T)
        return
    _, of_matrices = first_step(with_rounded_matrices(path, tmp_path), T)
    # Products have three kinds of operands with errors of one size: matrices, activations, output
    # gradients. They are independent, so that their squares add up.
    assert noise(ours, reference) < 3 * noise(of_matrices, reference)


def test_sharded_ranks_compute_what_one_does(path):
    rng = np.random.default_rng(2)
    batches = [random_batch(rng) for _ in range(2)]
    with trainer_for(path, grad_accumulation=2) as one:
        want, weights = one.step(batches), one.weights()
    options = {"zero_level": 3, "offload_opt_m": True, "offload_gradients": True}
    with trainer_for(path, gpus=2, **options) as two:
        got, sharded = two.step(batches), two.weights()
    # Sums in another order.
    np.testing.assert_allclose([got.loss, got.norm], [want.loss, want.norm], rtol=1e-5)
    for name, expected in weights.items():
        np.testing.assert_allclose(sharded[name], expected, rtol=1e-4, atol=1e-5)


def test_export_is_the_model_for_transformers(path, tmp_path):
    rng = np.random.default_rng(3)
    inputs, targets = random_batch(rng)
    with trainer_for(path) as trainer:
        trainer.step([random_batch(rng)])
        trainer.export(tmp_path / "out")
        loss = trainer.step([(inputs, targets)]).loss  # of the weights before it
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(inputs).long()).logits.view(-1, VOCAB)
    want = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets).long().view(-1))
    np.testing.assert_allclose(loss, want.item(), rtol=1e-5)


def test_a_checkpoint_holds_the_model(path, tmp_path):
    rng = np.random.default_rng(4)
    batches = [[random_batch(rng)] for _ in range(3)]
    with trainer_for(path, **FORMATS["jit"]) as trainer:
        trainer.step(batches[0])
        trainer.save(tmp_path / "ckpt")
        want = [trainer.step(batch) for batch in batches[1:]]
    with trainer_for(path, **FORMATS["jit"]) as trainer:
        trainer.load(tmp_path / "ckpt")
        assert [trainer.step(batch) for batch in batches[1:]] == want


def test_recomputing_norms_has_no_effect_where_their_output_is_not_kept():
    for name in ("tiny", "tiny-olmo2", "tiny-gemma3"):
        config = make_config({"recompute-norm": True, "model": name, "from-scratch": True})
        lines = RULES.idle(config, model=preset(name))
        assert [line.split()[0] for line in lines] == ["--recompute-norm"] * (name == "tiny-olmo2")
        whole = make_config({"recompute-block": True, "model": name, "from-scratch": True})
        assert RULES.idle(whole, model=preset(name)) == []


def test_architectures_are_named_in_their_files_alone():
    """No other module names an architecture, except presets."""
    names = [word for arch in ARCHITECTURES.values() for word in (arch.name, arch.model_type)]
    word = re.compile("|".join(f"""["']{name}["']""" for name in names))
    own = {PACKAGE / "options" / "presets.py", *PACKAGE.glob("arch/*.py")}
    for file in set(modules()) - own:
        found = word.search(file.read_text())
        assert found is None or PACKAGE / "ref" in file.parents, f"{file} names {found}"
