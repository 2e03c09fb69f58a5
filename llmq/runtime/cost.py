"""The cost of a launch, as the operation that launches it says: plans and card files go by that.

Nobody finds it out from a kernel's arguments. The bytes that a launch moves follow from the
declarations of its tensors (`Kernel.traffic`), so that an operation bound by memory has nothing to
say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from llmq.base.dtypes import F32, FP8, I8, DType
from llmq.runtime.kernel import Kernel

CACHED = 4096  # costs that are made once: a step launches the same few hundred, time after time

# Epilogues are what launches of ours do beside the library's product. Those of LONGER take so much
# time for it that their kinds say what they write; those of HIDDEN take none.
LONGER = ("swiglu", "swiglu_backward")
HIDDEN = ("gradient", "grouped")


class Kind(NamedTuple):
    """The name and sizes by which launches are told apart when their times are kept. name: words
    from the most telling one on, with `/` between them: what differs only in the last ones takes
    about as long. sizes: of a product (M, N, K); of attention (FLOPs, sequence length, head size,
    window); of all others (bytes of device memory,)."""

    name: str
    sizes: tuple[int, ...]

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product."""
        return self.name.startswith("matmul")

    @classmethod
    def moving(cls, name: str, device_bytes: int, formats: str = "") -> Kind:
        """The kind of what memory limits: a kernel of these tensors' formats, a copy or a fill."""
        return cls(f"{name}/{formats}", (device_bytes,))

    @classmethod
    def of(cls, kernel: Kernel, args: tuple, cost: Cost, device_bytes: int) -> Kind:
        """The kind of a launch, which its cost says, unless memory limits it."""
        return cost.kind or cls.moving(kernel.entry, device_bytes, kernel.formats(args))


class Heads(NamedTuple):
    """The heads of a call of the library's backward of attention, which takes them in so many
    parts, one after the other."""

    batch: int
    queries: int
    keys: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one launch beside the bytes that its tensors' declarations say.

    part: the part of a step that its time belongs to: "product", "attention" or "memory_bound".
    flops: floating-point operations.

    The rest is for launches that FLOPs may limit; `product_cost` and `attention_cost` give it.
    kind: what its time is kept by; that of all others is made of their tensors' formats.
    rate: which FLOP/s it reaches: "matmul", "matmul_fp8", "matmul_fp8_half", "matmul_int8", "f32",
    or a kernel of attention and where it is from, "attention_forward/library".
    fast: whether a product of fp8 codes may sum with fewer bits.
    matrices: bytes of the library's product of the same matrices, if the launch takes time for what
    it moves besides; else None. transposes: whether it writes codes in both layouts.
    heads: those of the library's backward of attention.
    label: what a profile says of it behind the kernel's name.
    """

    part: str = "memory_bound"
    flops: int = 0
    kind: Kind | None = None
    rate: str = ""
    fast: bool = False
    matrices: int | None = None
    transposes: bool = False
    heads: Heads | None = None
    label: str = ""


MOVES = Cost()
"""The cost of launches that memory limits."""


@lru_cache(CACHED)
def product_cost(
    sizes: tuple[int, int, int],
    a: DType,
    out: DType,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    addend: bool = False,
    fast: bool = False,
    epilogue: str = "",
    rank: int = 0,
    besides: str = "",
    transposes: bool = False,
    batch: int = 1,
    half: bool = False,
) -> Cost:
    """The cost of a matrix product, of the library or of ours.

    sizes: M, N, K. a, out: formats of the first operand, and of what the library would write.
    trans_a, trans_b, accumulate, addend, fast (fast_accumulation): as ops.product.matmul has them.
    epilogue: a word for what a launch of ours does besides; a card file without it is asked for the
    library's product. rank: columns of the adapters that are in the product. besides: the formats
    (`kernel.formats`) of the other tensors of one of LONGER. transposes: as Cost has it. batch: how
    many products of these sizes there are, which are kept as one with so many times M. half:
    with sums in half precision.
    """
    M, N, K = sizes
    matrices = (M * K + N * K) * a.itemsize + M * N * out.itemsize
    label = f"{M}x{N}x{K}"
    added = str(int(accumulate and not epilogue))
    if a in FP8:  # whether sums are fast matters more than which 8-bit format
        library, words = "matmul_fp8", [str(int(fast)), a.name, added]
    elif a is I8:
        library, words = "matmul_int8", [a.name]
    else:
        library = "matmul"
        words = [a.name, added, str(int(trans_b)), str(int(trans_a))]
        if not epilogue:
            label = f"{'t' if trans_a else 'n'}{'t' if trans_b else 'n'} {label}"
    several = "batch" if batch > 1 else ""
    more = (out.name, epilogue, besides, "addend" if addend else "", several)
    more += ("half",) if half else ()
    words += [word for word in more if word]
    label += (" accumulate" if accumulate else "") + (" addend" if addend else "")
    label += f" of {batch}" if several else ""
    return Cost(
        part="product",
        flops=2 * batch * M * N * (K + rank),
        kind=Kind("/".join([library, *words]), (batch * M, N, K)),
        rate="f32" if a is F32 else f"{library}_half" if half else library,
        fast=fast,
        matrices=matrices if epilogue and epilogue not in HIDDEN else None,
        transposes=transposes,
        label=label,
    )


@lru_cache(CACHED)
def attention_cost(
    kernel: Kernel,
    dtype: DType,
    flops: int,
    sizes: tuple[int, int, int],
    heads: Heads | None = None,
) -> Cost:
    """The cost of one of attention's kernels. dtype: the format of its tensors. sizes: sequence
    length, head size, and how many keys a query sees. heads: those of the library's backward."""
    way = f"{kernel.entry}/{kernel.file.partition('.')[2] or 'library'}"
    kind = Kind(f"{way}/{dtype.name}", (flops, *sizes))
    rate = "f32" if dtype is F32 else way
    return Cost(part="attention", flops=flops, kind=kind, rate=rate, heads=heads)


@lru_cache(CACHED)
def delta_cost(kernel: Kernel, dtype: DType, flops: int, sizes: tuple[int, int, int]) -> Cost:
    """The cost of one of the delta rule's kernels. dtype: the format of its tensors. sizes:
    sequence length, channels of a key, states."""
    way = f"{kernel.entry}/delta"
    kind = Kind(f"{way}/{dtype.name}", (flops, *sizes))
    return Cost(part="attention", flops=flops, kind=kind, rate="f32" if dtype is F32 else way)


BESIDE_ATTENTION = Cost(part="attention")
"""The cost of launches that memory limits and whose time counts to that of attention."""
