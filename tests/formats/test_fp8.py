"""fp8 products in the whole step, on the CPU device."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import transformers

from llmq.arch.model_config import ModelConfig
from llmq.model.head import gradient_scale
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import weight_table
from llmq.state.placement import place
from tests.covering import pairwise
from tests.models import CONFIGS, exported, random_batch, trainer_for

FP8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3"}
HEAD = {"head_dtype": "e4m3", "seq_len": 32}
FLAGS = ("swiglu", "norm", "ffn", "qkv", "att", "block")
GRADIENTS = ("e4m3", "e5m2")
RECIPES = ("jit", "delayed")
HEADS = ("bf16", "e4m3")
MODELS = ("qwen2", "qwen3", "llama_biases", "gpt2")


@pytest.fixture(params=MODELS)
def path(request):
    return exported(request.param)


def head_options(head):
    """The options that the format of the head's product needs."""
    return HEAD if head == "e4m3" else {}


def run(path, steps=2, **options):
    """Results and weights after some steps of two micro-steps."""
    rng, T = np.random.default_rng(0), options.get("seq_len", 24)
    with trainer_for(path, grad_accumulation=2, **options) as trainer:
        results = [trainer.step([random_batch(rng, T=T) for _ in range(2)]) for _ in range(steps)]
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights()


@cache
def plain(path, options: tuple):
    """A run that recomputes nothing."""
    return run(path, **dict(options))


def check_gradients(ours, reference, least, bound=0.05):
    """Cosine and norm of each gradient that is not nearly zero, such as a bias of keys."""
    largest = max(np.linalg.norm(g) for g in reference.values())
    for name, expected in reference.items():
        size, gradient = np.linalg.norm(expected), ours[name].astype(np.float32)
        if size < 0.02 * largest:
            continue
        cosine = np.vdot(gradient, expected) / (np.linalg.norm(gradient) * size)
        assert cosine > least, (name, cosine)
        assert abs(np.linalg.norm(gradient) / size - 1) < bound, name


@cache
def first_step(path, T, options: tuple):
    """The result of a step on one batch, and its gradients."""
    with trainer_for(path, seq_len=T, **dict(options)) as trainer:
        result = trainer.step([random_batch(np.random.default_rng(1), T=T)])
        return result, trainer.gradients()


@pytest.mark.parametrize(
    ("name", "gradient", "recipe", "head"),
    pairwise(name=MODELS, gradient=GRADIENTS, recipe=RECIPES, head=HEADS),
)
def test_gradients_are_close_to_f32(name, gradient, recipe, head):
    T = 32 if head == "e4m3" else 24
    options = FP8 | {"gradient_dtype": gradient, "fp8_recipe": recipe, "head_dtype": head}
    want, reference = first_step(exported(name), T, ())
    got, ours = first_step(exported(name), T, tuple(options.items()))
    # E4M3 keeps 4 bits of a value, E5M2 3: a product's relative error is some percent per element,
    # and it averages out over a tensor.
    assert abs(got.loss - want.loss) < 0.01 * want.loss
    check_gradients(ours, reference, {"e4m3": 0.98, "e5m2": 0.95}[gradient])


def same(one, other):
    return one[0] == other[0] and all(np.array_equal(one[1][n], other[1][n]) for n in one[1])


@pytest.mark.parametrize(
    ("name", "recipe", "head", "flag"),
    pairwise(name=MODELS, recipe=RECIPES, head=HEADS, flag=FLAGS),
)
def test_recompute_is_bitwise_equal(name, recipe, head, flag):
    options = FP8 | {"fp8_recipe": recipe} | head_options(head)
    again = run(exported(name), **options, **{f"recompute_{flag}": True})
    assert same(again, plain(exported(name), tuple(options.items())))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Four layers, so that layers of both kinds lie beside each other in all orders."""
    path = tmp_path_factory.mktemp("deep")
    config = CONFIGS["qwen3"]()
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(path)
    return path


FORMATS = {"fp32": {}, "jit": FP8, "delayed": FP8 | {"fp8_recipe": "delayed"}}


@pytest.mark.parametrize(
    ("layers", "format", "flag"),
    pairwise(layers=("0", "1-2", "0,2", "3"), format=FORMATS, flag=("norm", "ffn", "att", "block")),
)
def test_recomputing_some_layers_is_bitwise_equal(deep, layers, format, flag):
    options = FORMATS[format]
    recompute = {f"recompute_{flag}": True, "recompute_layers": layers}
    assert same(run(deep, **options, **recompute), plain(deep, tuple(options.items())))


def activations(model: ModelConfig, **options) -> int:
    """Bytes of a plan."""
    config = TrainConfig(batch_size=2, seq_len=64, **options).normalized()
    dev = PlanDevice(HOST_SPEC)
    Step(dev, model, config.for_step, place(config.for_step, weight_table(model)))
    return dev.arenas["device"].categories["Activations"]


# ------------------------------------------------------------------------------------------------
# The head


@pytest.mark.parametrize("name", ["qwen2", "qwen2_untied"])
def test_fp8_head_in_chunks(name):
    """Chunks change the order of one sum, and nothing before it."""
    batch = [random_batch(np.random.default_rng(2), T=32)]
    found, options = [], {"grad_accum_dtype": "fp32", **FP8, **HEAD}
    for chunks in (1, 4):
        with trainer_for(exported(name), lmhead_chunks=chunks, **options) as trainer:
            found.append((trainer.step(batch), trainer.gradients()))
            assert trainer.usage == trainer.plan.usage
    (one, whole), (four, cut) = found
    assert one.loss == four.loss
    head = "lm_head.weight" if name == "qwen2_untied" else "model.embed_tokens.weight"
    largest = np.abs(whole[head]).max()
    np.testing.assert_allclose(cut[head], whole[head], rtol=0, atol=1e-6 * largest)
    for parameter, gradient in whole.items():
        assert parameter == head or np.array_equal(gradient, cut[parameter]), parameter


def test_fp8_head_evaluates_with_its_own_logits(path):
    batch = random_batch(np.random.default_rng(2), T=32)
    with trainer_for(path, **FP8, **HEAD) as trainer:
        evaluated = trainer._step.evaluate([batch])
        trained = trainer.step([batch])
    assert (evaluated.loss, evaluated.numbers) == (trained.loss, trained.numbers)


def test_scale_of_the_gradient_of_logits():
    # -1 of the target and its largest z-loss fit; the smallest code is below any probability that
    # matters: 2^-16 of a scale of 2^-15.
    assert gradient_scale(0.0) == gradient_scale(1e-3) == 2.0**-15
    for z_loss in (0.0, 1e-4, 1e-2, 1.0):
        assert 1 + 64 * z_loss <= 57344 * gradient_scale(z_loss) < 3.5 * (1 + 64 * z_loss)


def test_z_loss_with_fp8_head():
    batch = [random_batch(np.random.default_rng(2), T=32)]
    found = []
    for options in ({"seq_len": 32}, FP8 | HEAD):
        with trainer_for(exported("qwen2"), z_loss=0.05, **options) as trainer:
            trainer.step(batch)
            found.append(trainer.gradients())
    check_gradients(found[1], found[0], 0.97)  # E5M2: 3 bits of each element of d_logits


@pytest.mark.parametrize(
    ("name", "recipe", "mlp", "chunks"),
    pairwise(name=MODELS, recipe=RECIPES, mlp=("bf16", "e4m3"), chunks=(1, 5)),
)
def test_tokens_of_a_micro_step_may_be_any_that_4_divides(name, recipe, mlp, chunks):
    """Sums over 20 tokens, or 4 of a chunk of the head, have zeros behind them, up to 16 more."""
    sizes = {"seq_len": 20, "batch_size": 1}
    options = FP8 | {"fp8_recipe": recipe, "head_dtype": "e4m3", "lmhead_chunks": chunks}
    if recipe == "delayed" and name != "gpt2":
        options["mlp_dtype"] = mlp
    batches, found = [random_batch(np.random.default_rng(1), B=1, T=20)], []
    for each in (sizes, sizes | options):
        with trainer_for(exported(name), **each) as trainer:
            found.append((trainer.step(batches).loss, trainer.gradients()))
            assert trainer.usage == trainer.plan.usage
    (want, reference), (got, ours) = found
    assert abs(got - want) < 0.01 * want
    check_gradients(ours, reference, 0.97)


# ------------------------------------------------------------------------------------------------
# Fast accumulation


class NotingDevice(PlanDevice):
    """Notes the shape of each fp8 product and whether it may accumulate fast."""

    def __init__(self):
        super().__init__(HOST_SPEC)
        self.products = []

    def launch(self, kernel, grid, block, args, **kwargs):
        super().launch(kernel, grid, block, args, **kwargs)
        if kernel.entry == "matmul_fp8":
            self.products.append((args[0].shape, bool(args[-2])))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("head", ["bf16", "e4m3"])
@pytest.mark.parametrize("fast", ["none", "forward", "activations", "all"])
def test_which_products_may_accumulate_fast(fast, head, recompute):
    L = 2
    model = dataclasses.replace(preset("Qwen2.5-0.5B"), num_layers=L)
    options = {"fp8_fast_accumulation": fast, "head_dtype": head, "recompute_block": recompute}
    config = TrainConfig(**FP8, **options, batch_size=1, seq_len=64, grad_accumulation=1)
    dev = NotingDevice()
    config = config.normalized()
    step = Step(dev, model, config.for_step, place(config.for_step, weight_table(model)))
    batch = (np.zeros((1, 64), np.int32),) * 2
    step.train(0, 0.0, 0.0, [batch])
    fp8_head = head == "e4m3"
    forward = 4 * L + fp8_head + 3 * L * recompute  # down is not needed again
    allowed = [permitted for _, permitted in dev.products]
    assert len(allowed) == forward + 8 * L + 2 * fp8_head
    counts = {"none": 0, "forward": forward, "activations": forward + 4 * L, "all": len(allowed)}
    assert sum(allowed) == counts[fast]
    rows = 64
    of_weights = [permitted for shape, permitted in dev.products if shape[0] != rows]
    assert len(of_weights) == 4 * L + fp8_head
    assert of_weights == [fast == "all"] * len(of_weights)
    assert allowed[: 4 * L + fp8_head] == [fast != "none"] * (4 * L + fp8_head)


@pytest.mark.parametrize(("fast", "head"), [("forward", "e4m3"), ("all", "bf16")])
def test_products_that_may_be_fast_are_summed_in_half_precision(fast, head):
    """But for those of the gradients of logits, whose codes are larger."""
    batches = [random_batch(np.random.default_rng(4), T=32)]
    options = FP8 | {"fp8_recipe": "delayed", "fp8_fast_accumulation": fast}
    options |= {"head_dtype": head, "seq_len": 32}
    launched, losses = {}, {}
    for sums in ("fp32", "fp16"):
        launched[sums] = []
        with trainer_for(exported("llama_biases"), fp8_accumulate=sums, **options) as trainer:
            dev, launch = trainer.dev, trainer.dev.launch

            def note(kernel, grid, block, args, launch=launch, seen=launched[sums], **kwargs):
                product = {"matmul_fp8": bool(args[-2:][0]), "grouped_product": True}
                if kernel.entry in product:
                    seen.append((args[0].shape, product[kernel.entry], kernel.entry))
                launch(kernel, grid, block, args, **kwargs)

            with dev.instead(launch=note):
                losses[sums] = [trainer.step(batches).loss for _ in range(3)]
    full, half = launched["fp32"], launched["fp16"]
    assert [(shape, fast) for shape, fast, _ in full] == [(shape, fast) for shape, fast, _ in half]
    assert {entry for *_, entry in full} == {"matmul_fp8"}
    assert all((entry == "grouped_product") == fast for _, fast, entry in half)
    assert losses["fp16"] != losses["fp32"]
    assert losses["fp16"][2] < losses["fp16"][0] < 6


def test_codes_of_half_precision_sums_are_gathered():
    options = FP8 | {"fp8_accumulate": "fp16", "seq_len": 32}
    batches = [random_batch(np.random.default_rng(5), T=32) for _ in range(2)]
    losses = []
    for shared in (
        {"grad_accumulation": 2},
        {"gpus": 2, "zero_level": 3, "persistent_quants": True},
    ):
        with trainer_for(exported("llama_biases"), **options, **shared) as trainer:
            losses.append(trainer.step(batches).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # the same, but for the order of sums


@pytest.mark.parametrize(
    ("gradient", "recipe", "head", "grads", "fast"),
    pairwise(
        gradient=GRADIENTS, recipe=RECIPES, head=HEADS, grads=("bf16", "fp32"), fast=("none", "all")
    ),
)
def test_all_formats_train_together(gradient, recipe, head, grads, fast):
    """Two steps of each, where nothing else looks at them."""
    batches = [random_batch(np.random.default_rng(4), T=32)]
    options = {"gradient_dtype": gradient, "fp8_recipe": recipe, "head_dtype": head}
    options |= {"grad_accum_dtype": grads, "fp8_fast_accumulation": fast, "seq_len": 32}
    with trainer_for(exported("llama_biases"), **FP8, **options) as trainer:
        losses = [trainer.step(batches).loss for _ in range(2)]
    assert losses[1] < losses[0] < 6
