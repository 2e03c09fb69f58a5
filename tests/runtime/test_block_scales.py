"""FP8 products as block-scaled ones: with a stand-in for cuBLASLt on a card that has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32
from llmq.base.operand import ProductCodes
from llmq.ops.product.matmul import matmul_fp8
from llmq.runtime import tuning
from llmq.runtime.cublaslt import CublasLt
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.product import scales_bytes
from llmq.runtime.tuning import Choices
from tests.harness import GPU_SPEC, MIB, host_device, run
from tests.runtime.fake_cublaslt import STREAM, FakeCublasLt, FakeCuda

SPEC = replace(GPU_SPEC, capability=120, library_workspace=4 * MIB)
SIZES = MemorySizes(device=8 * MIB, stack=8 * MIB, pinned=0)
SHAPE = (48, 144, 64)


class Blackwell(HostDevice):
    """A card whose products are the stand-in's, and that chooses as CudaDevice does."""

    def __init__(self, library, path=None):
        super().__init__(SIZES, poison=True)
        tuning._files.clear()  # a new process
        self.spec, self.library, self.launched = SPEC, library, []
        self.kinds = set()
        how = {"cache_path": path, "cuda": FakeCuda(library)}
        self.lt = CublasLt("GPU", tune=True, library=library, **how)
        self.ways = Choices("GPU", **how)

    def choose(self, work, ways, kept=()):
        self.ways.run(STREAM, work, ways, kept)

    def launch(self, kernel, grid, block, args, **options):
        self.launched.append(kernel.entry)
        if kernel.file == "product/matmul":
            self.kinds.add(options["cost"].kind)
        if kernel.file != "product/matmul":
            super().launch(kernel, grid, block, args, **options)
            return
        kernel.bind(args)
        getattr(self.lt, kernel.entry.removeprefix("matmul_"))(STREAM, *args)

    def close(self):
        self.lt.close()
        assert not self.library.alive  # every descriptor is freed


def arrays_of(shape=SHAPE, dtypes=(E4M3, E4M3), out=BF16, **more):
    M, N, K = shape
    rng = np.random.default_rng(0)
    arrays = {
        "out": rng.normal(size=(M, N)).astype(out.numpy),
        "a": rng.normal(size=(M, K)).astype(dtypes[0].numpy),
        "b": rng.normal(size=(N, K)).astype(dtypes[1].numpy),
        "scale_a": np.array([0.37], np.float32),
        "scale_b": np.array([1.9], np.float32),
    }
    added = {"bias": (N,), "addend": (M, N)}
    return arrays | {
        name: rng.normal(size=added[name]).astype((BF16 if name == "bias" else out).numpy)
        for name in more
        if more[name]
    }


def product(dev, arrays, accumulate=False):
    """The result, and how it was computed."""
    call = lambda dev, **tensors: matmul_fp8(dev, accumulate=accumulate, **tensors)  # noqa: E731
    out = run(dev, call, arrays)["out"]
    return out, dev.launched[-1] if isinstance(dev, Blackwell) else None


def blackwell(costs=(2.0,), block_costs=(1.0,), **more):
    library = FakeCublasLt(costs, block_costs=block_costs)
    return Blackwell(library, **more)


CASES = {
    "plain": {},
    "bias": {"bias": True},
    "addend": {"addend": True},
    "gradient": {"dtypes": (E5M2, E4M3)},
    "f32": {"out": F32},
    "ragged": {"shape": (144, 272, 160)},
    "accumulate": {"out": F32, "accumulate": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_product(case):
    accumulate = case.get("accumulate", False)
    arrays = arrays_of(**{k: v for k, v in case.items() if k != "accumulate"})
    dev = blackwell()
    got, entry = product(dev, arrays, accumulate)
    want, _ = product(host_device(), arrays, accumulate)
    assert entry == "matmul_mxfp8" and "matmul_fp8" in dev.launched
    assert len(dev.kinds) == 1  # what a rig measures of either is that of the product
    error = np.abs(got.astype(np.float32) - want.astype(np.float32)).max()
    # F32 sums of up to 160 products in another order; a result in BF16 is rounded once more.
    assert error <= (2.0**-7 if got.dtype == BF16.numpy else 1e-6) * np.abs(want).max()
    dev.close()


@pytest.mark.parametrize("block_costs", [(), (None,), (3.0,)], ids=["none", "fails", "slower"])
def test_what_is_refused_or_slower_is_not_taken(block_costs, capsys):
    dev = blackwell(block_costs=block_costs)
    got, entry = product(dev, arrays_of())
    assert entry == "matmul_fp8"
    np.testing.assert_array_equal(got, product(blackwell(block_costs=()), arrays_of())[0])
    assert capsys.readouterr().err == ""
    dev.close()


def test_a_library_that_is_wrong_is_not_taken():
    dev = blackwell()
    dev.library.ignores_alpha = True
    assert product(dev, arrays_of())[1] == "matmul_fp8"
    asked = len(dev.library.asked)
    assert product(dev, arrays_of((16, 16, 32)))[1] == "matmul_fp8"
    assert len(dev.library.asked) == asked + 1  # the trial is not made again
    dev.close()


def test_an_old_library_is_not_asked(monkeypatch):
    monkeypatch.delattr(FakeCublasLt, "MatmulMatrixScale")
    dev = blackwell()
    assert product(dev, arrays_of())[1] == "matmul_fp8"
    dev.close()


def test_a_library_that_does_not_know_the_attribute(monkeypatch):
    dev = blackwell()
    set_attribute = dev.library.matmul_desc_set_attribute

    def refusing(handle, name, *buffer):
        if name in (31, 32):
            raise dev.library.cuBLASLtError("invalid value")
        set_attribute(handle, name, *buffer)

    monkeypatch.setattr(dev.library, "matmul_desc_set_attribute", refusing)
    assert product(dev, arrays_of())[1] == "matmul_fp8"
    dev.close()


def test_the_choice_is_kept(tmp_path):
    path = tmp_path / "m.json"
    for costs, block_costs in (((2.0,), (1.0,)), ((1.0,), (2.0,))):
        dev = blackwell(costs, block_costs, path=path)
        assert product(dev, arrays_of())[1] == "matmul_mxfp8"
    assert len(dev.library.runs) == 1  # neither timed nor tried
    (name,) = dev.ways.chosen
    assert name.startswith("matmul_fp8 48x144x64 nt e4m3->bf16, 4194304 bytes")


def test_where_it_is_not_tried():
    for spec in (GPU_SPEC, replace(SPEC, capability=100), replace(SPEC, capability=89)):
        dev = blackwell()
        dev.spec = spec
        assert product(dev, arrays_of())[1] == "matmul_fp8"
    dev = blackwell()
    assert product(dev, arrays_of((16, 16, 48)))[1] == "matmul_fp8"  # no whole blocks
    dev.spec = replace(SPEC, library_workspace=2 * 16384 - 1)  # too small for the scales
    arrays = arrays_of((1024, 16, 512))
    assert scales_bytes(1024, 512) == 16384
    assert product(dev, arrays)[1] == "matmul_fp8"


def test_codes_are_not_made_by_it():
    dev, arrays = blackwell(), arrays_of(out=E4M3) | {"factor": np.ones(1, np.float32)}
    arrays |= {"largest": np.zeros(1, np.float32)}

    def call(dev, out, factor, largest, **tensors):
        matmul_fp8(dev, ProductCodes(out, factor, factor, largest), **tensors)

    run(dev, call, arrays)
    assert dev.launched == ["matmul_fp8"] * len(dev.launched)


def test_a_plan_needs_no_more_memory_and_has_its_code():
    devices = [PlanDevice(spec) for spec in (replace(SPEC, capability=100), SPEC)]
    for dev in devices:
        tensors = {
            name: dev.alloc(name, shape, dtype, "Activations")
            for name, shape, dtype in (
                ("out", (48, 144), BF16),
                ("a", (48, 64), E4M3),
                ("b", (144, 64), E4M3),
                ("scale_a", (1,), F32),
                ("scale_b", (1,), F32),
            )
        }
        matmul_fp8(dev, **tensors)
    plain, both = devices
    assert plain.sizes() == both.sizes()
    assert both.launches == plain.launches == {"matmul_fp8": 1}
    assert both.bytes == plain.bytes and both.flops == plain.flops
    assert {source.entry for source in both.sources - plain.sources} == {"block_scales"}


@pytest.mark.parametrize("rows, depth, want", [(1, 32, 512), (128, 128, 512), (129, 160, 2048)])
def test_bytes_of_block_scales(rows, depth, want):
    assert scales_bytes(rows, depth) == want
