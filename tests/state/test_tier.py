"""A kind of memory that llmq does not have holds what is offloaded, and changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmq
from llmq.base.dtypes import F32
from llmq.ops.pointwise import elementwise
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from tests.filed import NEEDS, register
from tests.runs import make_workplace, options
from tests.sharded import FP8, QWEN2, assert_same, assert_same_run, move_in_pieces, run

MASTER32 = {"master_dtype": "fp32", "opt_m_dtype": "fp32"}
MOMENTS = {"offload_opt_m": True, "offload_opt_v": True}
FILE = {"write_combined": True}


@pytest.fixture(autouse=True)
def tier(monkeypatch):
    return register(monkeypatch)


def test_a_tier_needs_itself_and_three_files():
    root = Path(__file__).parents[2]
    assert len(NEEDS) <= 3 and all((root / name).exists() for name in NEEDS)
    for path in (root / "llmq").rglob("*.py"):
        named = '"write_combined"' in path.read_text()
        assert not named or path.relative_to(root) in {*map(Path, NEEDS), *OF_THE_OPTION}, path


OPTIONS = Path("llmq/options")
OF_THE_OPTION = {OPTIONS / name for name in ("groups/parallel.py", "savers.py", "options_io.py")}


def test_no_kernel_gets_what_it_does_not_reach(tier):
    dev = HostDevice(MemorySizes(device=1 << 12, write_combined=1 << 12))
    here, there = (
        dev.alloc("x", (8,), F32, "Activations", place) for place in ("device", tier.name)
    )
    elementwise.fill(dev, here, 3.0)
    dev.copy(there, here)
    assert dev.download(there).tolist() == [3.0] * 8 and len(tier.files) == 1
    with pytest.raises(TypeError, match="no kernel reaches x, which is write_combined"):
        elementwise.fill(dev, there, 1.0)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "base, more",
    [
        (MASTER32, MOMENTS),
        (MASTER32, MOMENTS | {"use_zero_copy": True}),
        (
            FP8 | {"zero_level": 2},
            MOMENTS | {"shard_weights": True, "shard_gradients": True, "offload_gradients": True},
        ),
    ],
    ids=["moments", "zero-copy", "gradients"],
)
def test_it_changes_no_bit(tier, monkeypatch, base, more, world):
    """Run checks that each rank takes the memory of the plan, to the byte."""
    move_in_pieces(monkeypatch, 1024)
    assert_same_run(run(world, 1, of=QWEN2, **base), run(world, 1, of=QWEN2, **base | more | FILE))


def test_masters_are_refused_there():
    """Kernels fill them with random numbers, and make work weights of them, where they lie."""
    with pytest.raises(TypeError, match="no kernel reaches x, which is write_combined"):
        run(1, 1, of=QWEN2, **MASTER32, offload_master=True, **FILE)


def test_it_is_planned_saved_and_gone_on_from(tmp_path, monkeypatch):
    """Bytes in the tier do not count as host memory."""
    monkeypatch.chdir(make_workplace(tmp_path))

    def trainer(**changes):
        given = options(grad_accumulation=1, steps=4, **changes)
        given = {n.replace("-", "_"): value for n, value in given.items() if value is not None}
        return llmq.Trainer(**given)

    with trainer(**MOMENTS, **FILE) as t, trainer(**MOMENTS) as pinned:
        sizes = t.plan.usage.sizes
        moved = pinned.plan.usage.sizes["pinned"] - sizes["pinned"]
        assert sizes["write_combined"] == moved > 0
        assert pinned.plan.usage.sizes.host - sizes.host == moved
        t.step()
        path, rest = t.save(), [t.step(), t.step()]
        weights = t.weights()
    with trainer(**MOMENTS) as t:
        t.load(path)
        assert [t.step(), t.step()] == rest
        assert_same(t.weights(), weights)
