"""Exponentials of logits behind their product on a device, against the reference.

Operands are small multiples of 1/8, so that logits have the same bits in any order of sums.
"""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.ops import matmul_exp
from llmq.ops.product import Sizes, taken
from llmq.ref.matmul_exp import CASES
from llmq.runtime.machine import PLAN_SPEC
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run
from tests.own_products import arrays_of_logits, devices_without, wrong_logits

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}
# The argument of the exponential, up to 100 in powers of two, is rounded twice; e may then round
# the other way.
SUM, E = {"rtol": 2**-16}, {"rtol": 2**-7}


def arrays_of(rng, M, N, K, vocab):
    def eighths(*shape):
        return (rng.integers(-9, 10, shape) / 8).astype(BF16.numpy)

    beside = arrays_of_logits(rng, M, N, vocab, BF16, spread=20)
    return beside | {"a": eighths(M, K), "b": eighths(N, K)}


def check(dev, arrays, vocab):
    def call(dev, **tensors):
        matmul_exp.forward(dev, **tensors, vocab_size=vocab)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["target_logits"], want["target_logits"])
    np.testing.assert_allclose(got["sums"], want["sums"], **SUM)
    e, expected = got["e"].astype(np.float32), want["e"].astype(np.float32)
    np.testing.assert_allclose(e, expected, **E, atol=1e-37)  # what is smaller is 0 on a GPU
    assert not e[:, vocab:].any()
    return got


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(hopper, rng, case):
    """Clusters whose second block has nothing, edges of tiles, and more tiles than clusters."""
    arrays = arrays_of(rng, *case)
    found = check(hopper, arrays, case[-1])
    masked = arrays["targets"] < 0
    assert (found["target_logits"][masked] == -7).all()


def test_too_large_and_not_a_number(hopper, rng):
    """Infinite, not clamped, so that the sum tells; a NaN stays in its row."""
    arrays = arrays_of(rng, *SMALL["small"])
    arrays["shift"][5] = -1000
    arrays["a"][6, 3] = np.nan
    found = check(hopper, arrays, SMALL["small"][-1])
    assert np.isinf(found["sums"][0, 5]) and np.isnan(found["sums"][0, 6])


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_all_multiprocessors(hopper, rng):
    """Several tiles of each cluster, in several groups of columns; twice the same bits."""
    *_, vocab = case = (2064, 9000, 1032, 8888)
    arrays = arrays_of(rng, *case)
    arrays["b"] = (arrays["b"].astype(np.float32) / 8).astype(BF16.numpy)
    first, second = (check(hopper, arrays, vocab) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array.view(np.uint8), second[name].view(np.uint8))


def test_which_products_it_serves():
    dev = PlanDevice(GPU_SPEC)

    def serves(dev=dev, M=4096, N=151936, K=896, dtype=BF16):
        return taken(dev, "exp", Sizes(M, N, K, dtype, dtype))

    assert serves() and serves(N=50304, K=768)
    assert not serves(dtype=F32) and not serves(M=1024) and not serves(N=4096)
    assert not serves(K=892) and not serves(N=50300)  # rows of no multiple of 16 bytes
    assert not any(serves(other) for other in devices_without())
    assert serves(PlanDevice(PLAN_SPEC))  # a plan for any GPU has the way that needs more


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)
    call, cases = wrong_logits(dev, BF16, BF16)
    matmul_exp.forward(dev, **call)
    assert dev.flops["matmul_exp"] == 2 * 32 * 96 * 64
    for change, error, match in cases:
        with pytest.raises(error, match=match):
            matmul_exp.forward(dev, **call | change)
