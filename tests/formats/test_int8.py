"""Products of signed bytes in the whole step, on the CPU device; kernels are in tests/ops."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from llmq.base.errors import ConfigError
from llmq.model.step import Step
from llmq.options.options import TrainConfig
from llmq.options.presets import preset
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.plan_device import PlanDevice
from llmq.state.placement import place, table_of
from tests.covering import pairwise
from tests.formats.test_fp8 import FLAGS, MODELS, check_gradients, first_step, run, same
from tests.models import exported, random_batch, trainer_for

INT8 = {"model_dtype": "bf16", "matmul_dtype": "int8"}
LORA = {"lora_rank": 4, "lora_dropout": 0.2, "train": "norms"}
KINDS = {"full": {}, "adapters": LORA | {"lora_alpha": LORA["lora_rank"]}}


def options_of(kind: str) -> dict:
    return INT8 | KINDS[kind]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_close_to_f32(name):
    want, reference = first_step(exported(name), 24, ())
    got, ours = first_step(exported(name), 24, tuple(INT8.items()))
    # A code is off by up to 1/254 of its row's largest value, which averages out over a tensor:
    # what is found is a third of this.
    assert abs(got.loss - want.loss) < 0.001 * want.loss
    check_gradients(ours, reference, 0.998, bound=0.02)


def test_tokens_of_a_micro_step_may_be_any_that_4_divides():
    """Sums over 20 tokens have zeros behind them, of stochastically rounded codes too."""
    batches, found = [random_batch(np.random.default_rng(1), B=1, T=20)], []
    for options in ({}, INT8):
        with trainer_for(exported("qwen3"), seq_len=20, batch_size=1, **options) as trainer:
            found.append((trainer.step(batches).loss, trainer.gradients()))
            assert trainer.usage == trainer.plan.usage
    (want, reference), (got, ours) = found
    assert abs(got - want) < 0.001 * want
    check_gradients(ours, reference, 0.998, bound=0.02)


def losses_of(path, steps=24, **options) -> np.ndarray:
    """The losses of a model that learns two batches by heart."""
    batches = [random_batch(np.random.default_rng(i)) for i in range(2)]
    with trainer_for(path, steps=steps, **options) as trainer:
        return np.array([trainer.step([batches[i % 2]]).loss for i in range(steps)])


# Each kind has a learning rate, what the mean of all losses may be off, and any of them. Runs in
# bf16 that differ in the seed of stochastic rounding are up to half as far apart; fp8 is twice as
# far from bf16 in the mean.
FOLLOWS = {"full": (2e-3, 0.0015, 0.012), "adapters": (2e-2, 0.01, 0.05)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_follows_that_of_bf16(kind):
    rate, mean, most = FOLLOWS[kind]
    path, options = exported("qwen2"), options_of(kind) | {"learning_rate": rate}
    got = losses_of(path, **options)
    want = losses_of(path, **options | {"matmul_dtype": "bf16"})
    assert want[-1] < 0.8 * want[0]
    assert (got != want).all()
    assert abs(got.mean() / want.mean() - 1) < mean
    assert np.abs(got / want - 1).max() < most


@cache
def plain(path, kind):
    """A run that recomputes nothing."""
    return run(path, **options_of(kind))


@pytest.mark.parametrize(
    ("name", "kind", "flag"), pairwise(name=("qwen3", "gpt2", "olmo2"), kind=KINDS, flag=FLAGS)
)
def test_recompute_is_bitwise_equal(name, kind, flag):
    path = exported(name)
    again = run(path, **options_of(kind), **{f"recompute_{flag}": True})
    assert same(again, plain(path, kind))


@pytest.mark.parametrize("options", [{}, {"zero_level": 3}, {"gpus": 1, "grad_accumulation": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_what_one_does(options, kind):
    """Also the same random numbers: a sequence has them wherever it is computed."""
    rng = np.random.default_rng(5)
    batches = [random_batch(rng, B=1, T=32) for _ in range(4)]
    formats = {"grad_accum_dtype": "fp32", "master_dtype": "fp32", "adam_epsilon": 1e-3}
    shape = {"batch_size": 1, "seq_len": 32, "gpus": 2} | formats
    found = []
    for division in ({"gpus": 1, "grad_accumulation": 2}, options):
        with trainer_for(exported("qwen3"), **options_of(kind), **shape | division) as trainer:
            results = [trainer.step(batches[2 * i : 2 * i + 2]) for i in range(2)]
            found.append((results, trainer.weights()))
    (want, reference), (got, ours) = found
    for a, b in zip(got, want, strict=True):
        # F32 sums over ranks in another order. Other random numbers change the norm by 5e-4.
        assert (a.loss, a.norm) == pytest.approx((b.loss, b.norm), rel=1e-5)
    for name, value in reference.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_rounded_by_seed(kind):
    """In both products: beside adapters there are only gradients of inputs; and nothing but its own
    product makes the gradient of the last block's last matrix another one."""
    path, batch = exported("qwen2"), [random_batch(np.random.default_rng(1))]
    found = []
    for seed in (1, 1, 2):
        options = options_of(kind) | {"seed": seed, "learning_rate": 0.0, "lora_dropout": None}
        with trainer_for(path, **options) as trainer:
            if kind == "adapters":  # fresh ones follow from the seed
                trainer._step.weights.init(trainer.model, 1)
            losses = [trainer.step(batch).loss for _ in range(2)]
            found.append((losses, trainer.step(batch).norm, trainer.gradients()))
    (losses, norm, gradients), again, other = found
    assert (losses, norm) == again[:2]
    assert losses == other[0]  # forward rounds to nearest
    assert norm != other[1]
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, again[2][name])
    if kind == "full":
        last = "model.layers.1.mlp.down_proj.weight"
        assert np.mean(gradients[last] != other[2][last]) > 0.5


def test_evaluation_has_the_losses_of_training():
    batch = random_batch(np.random.default_rng(2))
    with trainer_for(exported("qwen3"), **INT8) as trainer:
        evaluated = trainer._step.evaluate([batch])
        trained = trainer.step([batch])
    assert (evaluated.loss, evaluated.numbers) == (trained.loss, trained.numbers)


class NotingDevice(PlanDevice):
    """Counts launches by entry."""

    def __init__(self):
        super().__init__(HOST_SPEC)
        self.entries = Counter()

    def launch(self, kernel, *args, **kwargs):
        super().launch(kernel, *args, **kwargs)
        self.entries[kernel.entry] += 1


@pytest.mark.parametrize("kind", KINDS)
def test_which_products_are_of_bytes(kind):
    """All three of each matrix of a block, and no others: the head's and the adapters' are not."""
    L = 2
    model = replace(preset("Qwen2.5-0.5B"), num_layers=L)
    config = TrainConfig(**options_of(kind), batch_size=1, seq_len=64, grad_accumulation=1)
    config = config.normalized()
    dev = NotingDevice()
    step = Step(dev, model, config.for_step, place(config.for_step, table_of(config, model)))
    step.train(0, 0.0, 0.0, [(np.zeros((1, 64), np.int32),) * 2])
    trained = kind == "full"
    assert dev.entries["matmul_int8"] == (12 if trained else 8) * L
    assert dev.entries["matmul"] == (3 if trained else 2 + 4 * 4 * L)
    assert dev.entries["adapter_backward_partials"] == (0 if trained else 4 * L)
    assert "Quants" not in dev.arenas["device"].categories  # weights stay as they are


def test_a_nan_is_not_hidden_by_codes():
    """The NaN is in a weight: the loss is NaN, and the update is left out."""
    with trainer_for(exported("qwen2"), **INT8) as trainer:
        before = trainer.weights()
        name = next(n for n in before if "down_proj" in n)
        step = trainer._step
        slab = next(s for s in step.table if any(p.name == name for p in s.params))
        param = next(p for p in slab.params if p.name == name)
        master = step.weights.master[slab.name]
        values = trainer.dev.download(master)
        values[param.offset + 7] = np.nan
        trainer.dev.upload(master, values)
        step.weights.refresh()
        result = trainer.step([random_batch(np.random.default_rng(3))])
        assert np.isnan(result.loss) and np.isnan(result.norm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_dtype": "fp32"}, "int8 does not go with --model-dtype fp32, use fp32"),
        ({"gradient_dtype": "bf16"}, "--gradient-dtype: must be int8 with --matmul-dtype int8"),
        ({"head_dtype": "e4m3"}, "--head-dtype: e4m3 does not go with --matmul-dtype int8"),
        ({"fp8_recipe": "delayed"}, "--fp8-recipe: delayed needs --matmul-dtype e4m3"),
        ({"persistent_quants": True}, "--persistent-quants: needs --matmul-dtype e4m3"),
        ({"batch_size": 131, "seq_len": 1024}, "at most 133136 tokens of a micro-step, .* 134144"),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        config = TrainConfig(**INT8 | options).normalized()
        config.validate_with(preset("Qwen2.5-0.5B"))


def test_sizes_of_models():
    config = TrainConfig(**INT8).normalized()
    config.validate_with(preset("Qwen2.5-72B"))  # whose MLP has 59136 rows
    wide = replace(preset("Qwen2.5-72B"), intermediate_size=32784)
    with pytest.raises(ConfigError, match="at most 65536 rows, but the MLP's first has 65568"):
        config.validate_with(wide)
    with pytest.raises(ConfigError, match="multiples of 16, but the hidden_size is 904"):
        config.validate_with(replace(preset("Qwen2.5-0.5B"), hidden_size=904))
    for bad in ({"matmul_dtype": "bf16", "gradient_dtype": "int8"}, {"gradient_dtype": "int8"}):
        with pytest.raises(ConfigError, match="must be int8 with --matmul-dtype int8, and"):
            TrainConfig(**{"model_dtype": "bf16"} | bad).normalized().validate()
