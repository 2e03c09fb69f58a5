"""Several GPUs: the numbers of one, exact plans, resuming, and the end when a rank fails."""

from __future__ import annotations

import time

import numpy as np
import pytest

from llmq.base.errors import LlmqError
from llmq.model.step import Step
from llmq.runtime.gpu_info import gpu_count
from tests.bases import block_weights
from tests.conftest import gpu_problem
from tests.models import hf_model, random_batch, trainer_for

PROBLEM = gpu_problem() or (None if gpu_count() > 1 else "there is one GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]

T = 64  # the longest sequence of the test models
COPIES = {"memcpy_all_gather": True, "all_to_all_reduce": True, "memcpy_send_recv": True}
COLLECTIVES = {
    "nccl": {},
    "nccl_exchange": {"all_to_all_reduce": True},
    "copies": COPIES,
    "staged": {**COPIES, "p2p": "off"},
}
OFFLOAD = {"offload_opt_m": True, "offload_opt_v": True, "offload_master": True}


@pytest.fixture
def path(tmp_path):
    hf_model("qwen3").save_pretrained(tmp_path)
    return tmp_path


def trainer(path, world, **options):
    defaults = {"device": "cuda", "seq_len": T, "gpus": world, "grad_accumulation": 4 // world}
    return trainer_for(path, **defaults | options)


def batches(seed):
    rng = np.random.default_rng(seed)
    return [random_batch(rng, T=T) for _ in range(4)]


@pytest.fixture(params=[2, 4])
def world(request):
    if gpu_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


def run(path, world, **options):
    """The results of ten steps; what was planned is what was allocated."""
    with trainer(path, world, **options) as t:
        results = [t.step(batches(seed)) for seed in range(10)]
        assert t.usage == t.plan.usage
    return results


@pytest.fixture
def alone(path):
    return run(path, 1)


@pytest.mark.parametrize("offload", [{}, OFFLOAD], ids=["on_gpu", "offload"])
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("collectives", COLLECTIVES.values(), ids=COLLECTIVES)
def test_several_gpus_compute_what_one_does(path, world, alone, collectives, level, offload):
    together = run(path, world, zero_level=level, **collectives, **offload)
    for one, all_of_them in zip(alone, together, strict=True):
        assert one.tokens == all_of_them.tokens
        # TF32 products are the same, F32 sums are in another order.
        np.testing.assert_allclose(all_of_them.loss, one.loss, rtol=1e-5)
        np.testing.assert_allclose(all_of_them.norm, one.norm, rtol=1e-4)
        assert len(all_of_them.waits) == world and one.waits == ()
        # The same sum, added up in another order.
        assert np.mean(all_of_them.waits) == pytest.approx(all_of_them.communication, rel=1e-12)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("collectives", COLLECTIVES.values(), ids=COLLECTIVES)
def test_several_gpus_divide_sequences(path, world, alone, collectives, parts):
    if world % parts:
        pytest.skip(f"{world} GPUs are no multiple of {parts}")
    more = {"grad_accumulation": 4 * parts // world, "zero_level": 3, "recompute_block": True}
    together = run(path, world, context_parallel=parts, **more, **collectives)
    for one, all_of_them in zip(alone, together, strict=True):
        assert one.tokens == all_of_them.tokens
        np.testing.assert_allclose(all_of_them.loss, one.loss, rtol=1e-5)
        np.testing.assert_allclose(all_of_them.norm, one.norm, rtol=1e-4)


DIVIDED = {"qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3}}
DIVIDED |= {"qwen3_5": {"linear_num_value_heads": 10}, "granitemoehybrid": {}}


@pytest.mark.parametrize("model", DIVIDED)
def test_several_gpus_divide_heads_that_do_not_divide(tmp_path, world, model):
    hf_model(model, **DIVIDED[model]).save_pretrained(tmp_path)
    one = run(tmp_path, 1)
    several = run(tmp_path, world, context_parallel=world, grad_accumulation=4)
    for alone, together in zip(one[:4], several[:4], strict=True):
        np.testing.assert_allclose(together.loss, alone.loss, rtol=1e-5)
        np.testing.assert_allclose(together.norm, alone.norm, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, COPIES | {"zero_level": 3}], ids=["nccl", "copies"])
@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss", "qwen3_5"])
def test_experts_and_delta_nets_on_several_gpus(tmp_path, world, model, options):
    hf_model(model).save_pretrained(tmp_path)
    one, several = run(tmp_path, 1), run(tmp_path, world, **options)
    # A router's choice between experts of almost the same score may differ after some steps.
    for alone, together in zip(one[:4], several[:4], strict=True):
        np.testing.assert_allclose(together.loss, alone.loss, rtol=1e-5)
        np.testing.assert_allclose(together.norm, alone.norm, rtol=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("level", [1, 3])
def test_how_parts_travel_changes_no_bit(path, world, level, optimizer):
    """The sums are ours, in the order of ranks, whoever brings the parts."""
    more = {"optimizer": optimizer, "model_dtype": "bf16", "zero_level": level}
    ways = [options for name, options in COLLECTIVES.items() if name != "nccl"]
    ways.append({**COLLECTIVES["staged"], "mirror_weights": True})
    results = [run(path, world, **more, **way) for way in ways]
    assert results[1:] == results[:-1]


def test_where_codes_lie_changes_no_bit(path, world):
    options = {"model_dtype": "bf16", "matmul_dtype": "e4m3", "zero_level": 3, **COPIES}
    kept = {"persistent_quants": True}
    ways = [{}, kept, kept | {"offload_quants": True}]
    ways += [way | {"p2p": "off"} for way in ways]
    ways.append(kept | {"p2p": "off", "mirror_weights": True})
    results = [run(path, world, **options, **way) for way in ways]
    assert results[1:] == results[:-1]


@pytest.mark.parametrize("base", ["e4m3", "int8", "nf4"])
def test_where_a_frozen_model_lies_changes_no_bit(path, world, base):
    options = {"model_dtype": "bf16", "lora_rank": 4, "base_dtype": base, **COPIES}
    divided = {"zero_level": 3}
    ways = [{}, divided, divided | {"offload_master": True}, divided | {"p2p": "off"}]
    ways.append(divided | {"p2p": "off", "mirror_weights": True})
    results = [run(path, world, **options, **way) for way in ways]
    assert results[1:] == results[:-1]
    with trainer(path, world, **options | divided) as t:
        several = block_weights(t)
    with trainer(path, 1, **options) as t:
        alone = {p.name: values for p, values in block_weights(t).items()}
    for param, values in several.items():
        np.testing.assert_array_equal(values, alone[param.name], err_msg=param.name)


def test_a_continued_run_is_the_same_to_the_bit(path, tmp_path):
    options = {"model_dtype": "bf16", "zero_level": 3, **COPIES}
    with trainer(path, 2, **options) as t:
        t.step(batches(0))
        saved = t.save(tmp_path / "ckpt")
        after = [t.step(batches(seed)) for seed in range(3)]
    with trainer(path, 2, **options) as t:
        t.load(saved)
        assert [t.step(batches(seed)) for seed in range(3)] == after


@pytest.mark.parametrize("options", [{}, {"zero_level": 3, **COPIES}], ids=["nccl", "copies"])
@pytest.mark.parametrize("step", [0, 1, 4])  # eager, while captured, replayed
def test_a_rank_that_fails_ends_the_other(path, options, step, monkeypatch):
    """The other GPU waits for it in a stream, and is let go."""
    real = Step.update

    def update(self, kind):
        if self.dev.mesh.rank == 1 and self.dev.kind == "cuda" and self.updates == step:
            raise LlmqError("no more")
        self.updates = self.updates + 1
        return real(self, kind)

    error = pytest.raises(LlmqError, match=r"^rank 1: no more$")
    with error, trainer(path, 2, **options) as t:
        monkeypatch.setattr(Step, "updates", 0, raising=False)
        monkeypatch.setattr(Step, "update", update)
        start = time.monotonic()
        for seed in range(6):
            t.step(batches(seed))
    assert time.monotonic() - start < 20  # the first step compiles; the end takes up to 5 s
    monkeypatch.undo()
    with trainer(path, 2, **options) as t:  # the GPUs are as they were
        t.step(batches(0))
