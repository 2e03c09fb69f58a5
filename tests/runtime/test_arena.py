"""Arena, stack, tensors: offsets, limits, accounting."""

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.base.tensor import Storage, Tensor
from llmq.runtime.arena import ALIGN, Arena, Stack, align_up


def host_storage(nbytes):
    data = np.zeros(nbytes, np.uint8)
    return Storage("device", data.ctypes.data, data)


def test_align_up():
    assert [align_up(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert align_up(65, 64) == 128


def test_an_arena_hands_out_aligned_pieces_that_do_not_overlap():
    arena = Arena(Storage("device", base=1 << 20))
    sizes = [(3,), (64,), (65,), (1,)]
    tensors = [arena.take(str(i), s, F32, "Weights") for i, s in enumerate(sizes)]
    assert all(t.ptr % ALIGN == 0 for t in tensors)
    ends = [t.offset + t.nbytes for t in tensors]
    assert all(end <= after.offset for end, after in zip(ends, tensors[1:], strict=False))
    assert arena.used == 256 + 256 + 512 + 256


def test_an_arena_counts_by_category():
    arena = Arena(Storage("device"))
    arena.take("a", (1,), F32, "Weights")
    arena.take("b", (100,), BF16, "Adam M")
    arena.take("c", (100,), F32, "Weights")
    assert dict(arena.categories) == {"Weights": 768, "Adam M": 256}
    assert [(c, t.name) for c, t in arena.tensors] == [
        ("Weights", "a"),
        ("Adam M", "b"),
        ("Weights", "c"),
    ]


def test_a_full_arena_names_the_tensor():
    arena = Arena(Storage("device"), capacity=512)
    arena.take("a", (64,), F32, "Weights")
    arena.take("b", (64,), F32, "Weights")
    with pytest.raises(MemoryError, match=r"c F32 \[1\] needs 256 bytes, 0 are left"):
        arena.take("c", (1,), F32, "Weights")
    assert arena.used == 512


def test_the_stack_reuses_memory_and_remembers_its_peak():
    stack = Stack(Storage("stack"))
    with stack.scratch("a", (64,), F32) as a:
        with stack.scratch("b", (128,), F32) as b:
            assert (a.offset, b.offset, stack.used) == (0, 256, 768)
        with stack.scratch("c", (1,), F32) as c:
            assert c.offset == 256
    assert stack.used == 0
    assert stack.high_water_mark == 768
    assert stack.high_water_tensors == [("a", 256), ("b", 512)]


def test_a_full_stack_names_the_tensor():
    stack = Stack(Storage("stack"), capacity=256)
    with (
        stack.scratch("a", (1,), F32),
        pytest.raises(MemoryError, match=r"b \[2, 3\] needs 256 bytes, 0 are left"),
        stack.scratch("b", (2, 3), F32),
    ):
        pass
    assert stack.used == 0


def test_the_stack_is_freed_by_exceptions():
    stack = Stack(Storage("stack"))
    with pytest.raises(KeyError), stack.scratch("a", (1,), F32):
        raise KeyError
    assert stack.used == 0 and stack.live == []


def test_the_stack_insists_on_last_in_first_out():
    stack = Stack(Storage("stack"))
    a, b = stack.scratch("a", (1,), F32), stack.scratch("b", (1,), F32)
    a.__enter__()
    b.__enter__()
    for first, second in ((a, "a"), (b, "b")):
        with pytest.raises(AssertionError, match=f"{second} was not the last"):
            first.__exit__(None, None, None)


def test_views_and_rows_share_memory():
    storage = host_storage(1024)
    x = Tensor("x", (4, 6), F32, storage, 256)
    x.numpy()[...] = np.arange(24).reshape(4, 6)
    assert x.view(2, 12).numpy()[1, 0] == 12
    part = x.rows(1, 3)
    assert (part.shape, part.ptr) == ((2, 6), x.ptr + 24)
    part.numpy()[...] = 0
    assert x.numpy().sum() == np.arange(24).sum() - np.arange(6, 18).sum()
    with pytest.raises(ValueError, match="24 elements"):
        x.view(5, 5)
    for start, stop in ((2, 2), (-1, 2), (3, 5)):
        with pytest.raises(ValueError, match="outside of x F32"):
            x.rows(start, stop)


def test_tensors_that_the_host_cannot_read():
    x = Tensor("x", (4,), I32, Storage("device", base=512), 0)
    assert x.ptr == 512
    with pytest.raises(RuntimeError, match=r"x I32 \[4\] is not readable"):
        x.numpy()
