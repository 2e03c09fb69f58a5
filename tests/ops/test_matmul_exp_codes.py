"""Codes of exponentials of logits behind their fp8 product on a device, against the reference.

Operands are small integers, so that logits have the same bits in any order of sums.
"""

import numpy as np
import pytest

from llmq.base.dtypes import E4M3, E5M2, F32, I32
from llmq.ops import matmul_exp_codes
from llmq.ops.common import num_sums
from llmq.ref.matmul_exp_codes import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, host_device, run
from tests.own_products import devices_without, whole

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}
# The argument of the exponential, up to 100 in powers of two, is rounded twice; a code may then
# round the other way.
SUM = {"rtol": 2**-16}


def arrays_of(rng, M, N, K, vocab):
    targets = rng.integers(0, vocab, M).astype(np.int32)
    targets[:3] = vocab - 1, 0, 64
    targets[3::4] = -100
    return {
        "e": np.full((M, N), np.nan, E5M2.numpy),
        "sums": np.full((num_sums(N), M), np.nan, np.float32),
        "target_logits": np.full(M, -7, np.float32),
        "a": whole(rng, E4M3, M, K),
        "b": whole(rng, E4M3, N, K),
        "scale_a": np.full(1, 2.0**-4, np.float32),
        "scale_b": np.full(1, 2.0**-1, np.float32),
        "shift": rng.normal(size=M).astype(np.float32) * 4,
        "targets": targets,
    }


def same_codes(got, want):
    """But a few, which are neighbours."""
    first, second = (codes.view(np.uint8).astype(np.int32) for codes in (got, want))
    assert abs(first - second).max() <= 1 and (first == second).mean() > 0.999


def check(dev, arrays, vocab):
    def call(dev, **tensors):
        matmul_exp_codes.forward(dev, **tensors, vocab_size=vocab)

    got, want = run(dev, call, arrays), run(host_device(), call, arrays)
    np.testing.assert_array_equal(got["target_logits"], want["target_logits"])
    np.testing.assert_allclose(got["sums"], want["sums"], **SUM)
    same_codes(got["e"], want["e"])
    counted = np.flatnonzero(arrays["targets"] >= 0)
    assert not got["e"][:, vocab:].astype(np.float32).any()
    assert not got["e"][counted, arrays["targets"][counted]].astype(np.float32).any()
    return got


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(hopper, rng, case):
    """Clusters whose second block has nothing, edges of tiles, and more tiles than clusters."""
    arrays = arrays_of(rng, *case)
    found = check(hopper, arrays, case[-1])
    masked = arrays["targets"] < 0
    assert (found["target_logits"][masked] == -7).all()


def test_too_large_and_not_a_number(hopper, rng):
    """Codes are clamped, and the sum tells; a NaN stays in its row."""
    arrays = arrays_of(rng, *SMALL["small"])
    arrays["shift"][4:6] = -20, -1000
    arrays["a"][6, 3] = np.nan
    found = check(hopper, arrays, SMALL["small"][-1])
    assert found["e"][4].astype(np.float32).max() == 57344 < found["sums"][0, 4]
    assert np.isinf(found["sums"][0, 5]) and np.isnan(found["sums"][0, 6])


@pytest.mark.parametrize("count", [0, 1, 203])
def test_again(hopper, rng, count):
    """Rows that are listed, and no other ones."""
    M, _, K, vocab = case = SMALL["tiles"]
    arrays = arrays_of(rng, *case)
    arrays.pop("sums"), arrays.pop("target_logits")
    arrays["e"] = whole(rng, E5M2, *arrays["e"].shape)
    listed = np.sort(rng.choice(M, count, replace=False)).astype(np.int32)
    arrays["rows"] = np.full(1 + M, 1 << 30, np.int32)
    arrays["rows"][: 1 + count] = count, *listed
    arrays["a"] = np.full((M, K), np.nan, E4M3.numpy)
    arrays["a"][:count] = whole(rng, E4M3, count, K)

    def call(dev, **tensors):
        matmul_exp_codes.again(dev, **tensors, vocab_size=vocab)

    got, want = run(hopper, call, arrays), run(host_device(), call, arrays)
    same_codes(got["e"][listed], want["e"][listed]) if count else None
    others = np.delete(np.arange(M), listed)
    for name in arrays:
        before, after = (x[name][others] if name == "e" else x[name] for x in (arrays, got))
        np.testing.assert_array_equal(after.view(np.uint8), before.view(np.uint8))


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_all_multiprocessors(hopper, rng):
    """Several tiles of each cluster, in several groups of columns; twice the same bits."""
    *_, vocab = case = (2064, 9008, 1040, 8888)
    arrays = arrays_of(rng, *case)
    arrays["scale_b"][0] = 2.0**-4
    first, second = (check(hopper, arrays, vocab) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array.view(np.uint8), second[name].view(np.uint8))


def test_which_products_it_serves():
    dev = PlanDevice(GPU_SPEC)

    def serves(dev=dev, M=4096, N=151936, K=896, dtype=E4M3):
        return matmul_exp_codes.serves(dev, dev.alloc("a", (M, K), dtype, "Activations"), N)

    assert serves() and serves(N=50304, K=768)
    assert not serves(dtype=E5M2) and not serves(M=1024) and not serves(N=4096)
    assert not serves(M=4104) and not serves(K=888) and not serves(N=50312)  # not 16 bytes
    assert not any(serves(other) for other in devices_without())


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    a, b, row, one = tensor(E4M3, 32, 64), tensor(E4M3, 96, 64), tensor(F32, 32), tensor(F32, 1)
    call = {"e": tensor(E5M2, 32, 96), "a": a, "b": b, "scale_a": one, "scale_b": one}
    call |= {"shift": row, "targets": tensor(I32, 32), "vocab_size": 90}
    results = {"sums": tensor(F32, 1, 32), "target_logits": row}
    matmul_exp_codes.forward(dev, **call, **results)
    rows = tensor(I32, 33)
    matmul_exp_codes.again(dev, **call, rows=rows)
    assert dev.flops["matmul_exp_codes"] == 2 * 32 * 96 * 64
    for change, error, match in (
        ({"e": a}, TypeError, "e must be F8_E5M2, got F8_E4M3"),
        ({"b": tensor(E4M3, 96, 32)}, ValueError, r"b must have shape \(96, 64\)"),
        ({"b": tensor(E4M3, 90, 64)}, ValueError, "multiples of 16"),
        ({"scale_a": row}, ValueError, r"scale_a must have shape \(1,\)"),
        ({"shift": one}, ValueError, r"shift must have shape \(32,\)"),
        ({"targets": row}, TypeError, "targets must be I32, got F32"),
        ({"vocab_size": 97}, ValueError, r"vocab_size must be in \[1, 96\], got 97"),
    ):
        with pytest.raises(error, match=match):
            matmul_exp_codes.forward(dev, **call | change, **results)
    with pytest.raises(ValueError, match=r"sums must have shape \(1, 32\)"):
        matmul_exp_codes.forward(dev, **call, **results | {"sums": row})
    with pytest.raises(ValueError, match=r"again: rows must have shape \(33,\)"):
        matmul_exp_codes.again(dev, **call, rows=tensor(I32, 32))
