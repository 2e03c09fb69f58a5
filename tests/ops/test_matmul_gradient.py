"""A product that is added to a gradient, on a device against the reference: the same bits.

Operands are small integers, so that sums are exact in any order.
"""

from dataclasses import replace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.tensor import Accumulator
from llmq.ops import matmul_gradient
from llmq.ops.product import Sizes, taken
from llmq.ref.matmul_gradient import CASES
from llmq.runtime.plan_device import PlanDevice
from tests.harness import GPU_SPEC, compared, step_scalars
from tests.own_products import devices_without, whole

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def check(dev, rng, case, a=E4M3, *, accumulate=True, **options):
    M, N, K = case
    arrays = {
        "d": (rng.normal(size=(M, N)) * 100).astype(BF16.numpy),
        "a": whole(rng, a, M, K),
        "b": whole(rng, E4M3, N, K),
        "scalars": step_scalars(seed=1, step=2, micro_step=3),
    }
    if not accumulate:
        arrays["d"][:] = np.nan
    arrays |= {f"scale_{x}": np.array([s], np.float32) for x, s in (("a", 0.5), ("b", 4.0))}

    def call(dev, d, scalars, **operands):
        acc = Accumulator(d, accumulate, scalars, salt=4)
        matmul_gradient.add(dev, acc, **operands, **options)

    return compared(dev, call, arrays)["d"]


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_equals_reference(hopper, rng, case):
    """Clusters whose second block has nothing, edges of tiles, and more tiles than clusters."""
    check(hopper, rng, case)


def test_overwrites(hopper, rng):
    check(hopper, rng, SMALL["small"], accumulate=False)


# The following are sources of their own, which take long to compile for the emulator, or large.
gpu_only = pytest.mark.parametrize(
    "dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@gpu_only
def test_of_gradients_in_e5m2(hopper, rng):
    check(hopper, rng, SMALL["tiles"], E5M2)


@gpu_only
def test_fast_accumulation(hopper, rng):
    """Sums of a few whole numbers are exact in 14 bits."""
    check(hopper, rng, (304, 208, 144), fast_accumulation=True)


@gpu_only
def test_all_multiprocessors(hopper, rng):
    """Several tiles of each cluster, in several groups of columns; twice the same bits."""
    case = (2064, 9008, 4112)
    first, second = (check(hopper, np.random.default_rng(5), case) for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))


def test_which_gradients_it_serves():
    dev = PlanDevice(replace(GPU_SPEC, num_sms=132))  # an H100's

    def serves(dev=dev, M=17920, N=1536, K=32768, dtype=E4M3, target=BF16):
        return taken(dev, "gradient", Sizes(M, N, K, dtype, target))

    def served(weights):
        return [name for name, (M, N) in weights.items() if serves(M=M, N=N)]

    def weights(C, qkv, F):
        return {"qkv": (qkv, C), "o": (C, C), "up": (2 * F, C), "down": (C, F)}

    assert served(weights(896, 1152, 4864)) == ["up"]  # 0.5B: 4.7 columns of tiles
    assert served(weights(1536, 2048, 8960)) == ["qkv", "up"]
    assert served(weights(2048, 2560, 11008)) == ["up", "down"]
    assert served(weights(3584, 4608, 18944)) == ["up", "down"]
    assert not serves(target=F32) and not serves(K=2048)
    assert serves(dtype=E5M2) and not serves(dtype=BF16)
    assert not serves(K=32776) and not serves(N=1532)  # rows of no multiple of 16 bytes
    assert not any(serves(other) for other in devices_without())


def test_wrong_arguments():
    dev = PlanDevice(GPU_SPEC)

    def tensor(dtype, *shape):
        return dev.alloc("t", shape, dtype, "Weights")

    scale = tensor(F32, 1)
    acc = Accumulator(tensor(BF16, 32, 48), True, tensor(I32, 16), 1)
    fp8 = {"acc": acc, "a": tensor(E4M3, 32, 64), "b": tensor(E4M3, 48, 64)}
    fp8 |= {"scale_a": scale, "scale_b": scale}
    matmul_gradient.add(dev, **fp8)
    assert dev.flops["matmul_gradient"] == 2 * 32 * 48 * 64
    for change, error, match in (
        ({"scale_b": None}, TypeError, "scale_b must be"),
        ({"b": tensor(E5M2, 48, 64)}, TypeError, "b must be F8_E4M3, got F8_E5M2"),
        ({"b": tensor(E4M3, 48, 32)}, ValueError, r"b must have shape \(48, 64\)"),
        ({"a": tensor(BF16, 32, 64)}, TypeError, "a must be F8_E4M3 or F8_E5M2, got BF16"),
        ({"a": tensor(E4M3, 48, 64)}, ValueError, r"a must have shape \(32, 64\)"),
        ({"acc": acc._replace(tensor=tensor(F32, 32, 48))}, TypeError, "acc.tensor must be BF16"),
        ({"acc": acc._replace(tensor=scale)}, ValueError, "must have 2 dimensions"),
        (
            {"a": tensor(E4M3, 32, 72), "b": tensor(E4M3, 48, 72)},
            ValueError,
            r"multiples of 16 bytes, got \(32, 48, 72\)",
        ),
    ):
        with pytest.raises(error, match=match):
            matmul_gradient.add(dev, **fp8 | change)
