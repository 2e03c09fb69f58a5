"""The cost of a kernel launch, declared by the operation that launches. Costs are read by plans and
by card files, which hold measured rates of one GPU.

An operation must declare FLOPs, which cannot be derived from a kernel's arguments. The bytes that a
launch moves follow from the declarations of its tensors (`Kernel.traffic`), so memory-bound
operations declare no cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from llmq.base.dtypes import F32, FP8, I8, DType
from llmq.runtime.kernel import Kernel

CACHED = 4096  # number of costs that are cached; a step repeats a few hundred launches

# An epilogue is further work that our kernel does in the launch of a matrix product. The epilogues
# in LONGER take so long that their kinds also name the dtypes of their other tensors. The epilogues
# in HIDDEN take no extra time.
LONGER = ("swiglu", "swiglu_backward")
HIDDEN = ("gradient", "grouped")


class Kind(NamedTuple):
    """The key under which card files keep the measured times of launches. name: words separated by
    `/`, the most important first; launches whose names differ only in the last words take about
    equal time. sizes: (M, N, K) of a matrix product; (FLOPs, sequence length, head size, window) of
    attention; (bytes of device memory,) of other launches."""

    name: str
    sizes: tuple[int, ...]

    @property
    def is_product(self) -> bool:
        """True if the launch is a matrix product."""
        return self.name.startswith("matmul")

    @classmethod
    def moving(cls, name: str, device_bytes: int, formats: str = "") -> Kind:
        """Return the kind of a memory-bound launch: a kernel on tensors of these formats, a copy or
        a fill."""
        return cls(f"{name}/{formats}", (device_bytes,))

    @classmethod
    def of(cls, kernel: Kernel, args: tuple, cost: Cost, device_bytes: int) -> Kind:
        """Return the kind that a launch's cost declares, or else a memory-bound kind."""
        return cost.kind or cls.moving(kernel.entry, device_bytes, kernel.formats(args))


class Heads(NamedTuple):
    """The heads of one call of the library's attention backward, which divides the heads into
    `parts` parts. batch: number of sequences. queries, keys: number of query and key/value
    heads."""

    batch: int
    queries: int
    keys: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one launch, except the bytes that follow from the declarations of its tensors.

    part: the part of a step under which the launch's time counts: "product", "attention" or
    "memory_bound".
    flops: number of floating-point operations.

    The other fields are for launches whose time FLOPs may limit; `product_cost` and
    `attention_cost` set these fields.
    kind: key of the launch's measured time; None: a key derived from the tensors' formats.
    rate: name of the FLOP/s that the launch reaches: "matmul", "matmul_fp8", "matmul_fp8_half",
    "matmul_int8", "f32", or an attention kernel with its origin, such as
    "attention_forward/library".
    fast: True if a product of fp8 codes may accumulate in fewer bits.
    matrices: bytes that the library's product of the same matrices moves, if the launch moves
    further bytes that take extra time; else None.
    transposes: True if the launch writes fp8 codes in both layouts, plain and transposed.
    heads: the heads of a call of the library's attention backward; None for other launches.
    label: text that a profile shows after the kernel's name.
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
"""The cost of memory-bound launches."""


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
    """Return the cost of a matrix product by the library or by our kernel.

    sizes: M, N, K. a, out: dtypes of the first operand, and of the result that the library would
    write. trans_a, trans_b, accumulate, addend, fast (fast_accumulation): see ops.product.matmul.
    epilogue: name of the further work that our kernel does; "" for none. If a card file has no
    times for this epilogue, the times of the library's product are used. rank: number of columns of
    the adapters in the product. besides: formats (`kernel.formats`) of the other tensors of an
    epilogue in LONGER. transposes: see Cost. batch: number of products of these sizes; their kind
    is the kind of one product with batch * M rows. half: True if sums are kept in FP16.
    """
    M, N, K = sizes
    matrices = (M * K + N * K) * a.itemsize + M * N * out.itemsize
    label = f"{M}x{N}x{K}"
    added = str(int(accumulate and not epilogue))
    if a in FP8:  # fast accumulation changes the time more than the choice of 8-bit format
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
    """Return the cost of an attention kernel. dtype: the tensors' dtype. sizes: sequence length,
    head size, and number of keys that a query sees. heads: the heads of a call of the library's
    backward."""
    way = f"{kernel.entry}/{kernel.file.partition('.')[2] or 'library'}"
    kind = Kind(f"{way}/{dtype.name}", (flops, *sizes))
    rate = "f32" if dtype is F32 else way
    return Cost(part="attention", flops=flops, kind=kind, rate=rate, heads=heads)


@lru_cache(CACHED)
def delta_cost(kernel: Kernel, dtype: DType, flops: int, sizes: tuple[int, int, int]) -> Cost:
    """Return the cost of a delta-rule kernel. dtype: the tensors' dtype. sizes: sequence length,
    channels of a key, states."""
    way = f"{kernel.entry}/delta"
    kind = Kind(f"{way}/{dtype.name}", (flops, *sizes))
    return Cost(part="attention", flops=flops, kind=kind, rate="f32" if dtype is F32 else way)


BESIDE_ATTENTION = Cost(part="attention")
"""The cost of memory-bound launches whose time counts as attention."""
