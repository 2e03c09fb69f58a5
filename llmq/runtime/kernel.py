"""Kernel declarations: an entry point with typed arguments that are checked on every device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from llmq.base.dtypes import DType
from llmq.base.tensor import Tensor
from llmq.runtime.declaration import Arg, Declaration

# TYPE_VARIABLES has the type variables of each kernel file, over all its declared entry points.
TYPE_VARIABLES: defaultdict[str, set[str]] = defaultdict(set)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel is an entry point of llmq/cu/<file>, or of a library if `file` does not end in
    `.cu`. The kernel's reference is the function of the same name in llmq/ref/<file>.py. Kernel and
    reference take the declared arguments in this order, and launchers use the same names.

    args: the declaration of the arguments (syntax: llmq/runtime/declaration.py). where: rules that
    the sizes must satisfy. gpu: further rules that apply only to the CUDA kernel. types: dtypes of
    type variables, such as "T=bf16, U=e4m3|e5m2"; the compiler gets the bound dtype as -D<letter>.
    capability: the only compute capability, times 10, that has the kernel's instructions; None if
    every supported GPU has them. programmatic: True if the kernel calls start_next_kernel and
    wait_for_earlier_kernels (cu/ptx.cuh), so that two such kernels in a row may overlap."""

    file: str
    entry: str
    args: str
    where: str = field(default="", kw_only=True)
    gpu: str = field(default="", kw_only=True)
    types: str = field(default="", kw_only=True)
    capability: int | None = field(default=None, kw_only=True)
    programmatic: bool = field(default=False, kw_only=True)
    declaration: Declaration = field(init=False, compare=False, repr=False)
    _moved: tuple[tuple[int, Arg], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        declaration = Declaration(self.entry, self.args, self.where, self.gpu, self.types)
        object.__setattr__(self, "declaration", declaration)
        moved = [(i, a) for i, a in enumerate(self.declared) if a.pointer and not a.sparse]
        moved = [(i, a) for i, a in moved if a.name != "workspace"]
        object.__setattr__(self, "_moved", tuple(moved))
        TYPE_VARIABLES[self.file].update(a.type for a in self.declared if a.is_type_variable)

    @property
    def op(self) -> str:
        """The operation of this entry point, which is the stem of its file's name."""
        return self.module.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The path of the operation's module below llmq.ops and llmq.ref, such as
        product.matmul."""
        return self.file.removesuffix(".cu").replace("/", ".")

    @property
    def declared(self) -> tuple[Arg, ...]:
        """The declared arguments."""
        return self.declaration.args

    def bind(self, args: tuple, *, on_gpu: bool = True) -> dict[str, DType]:
        """Check a launch's arguments against the declaration; return the dtypes of type variables.
        The TypeError or ValueError names entry point, argument, expected and given value."""
        return self.declaration.check(args, on_gpu)

    def dims(self, **given: Tensor | int) -> tuple[int, ...]:
        """Return the sizes of the dimensions named in these arguments' shapes, in order of first
        appearance. Launchers need these sizes before the launch. Sizes that are arguments in
        `given` are left out. Errors are raised as in `bind`."""
        return self.declaration.dims(given)

    def traffic(self, args: tuple) -> tuple[int, int, int]:
        """Return the bytes that one launch must move: in device memory, read from host memory, and
        written to host memory. A declared access reads or writes the whole tensor once. A `sparse`
        tensor does not count, because a launch accesses few of its elements. A `workspace` does not
        count, because a library's use of it is unknown."""
        device = loaded = stored = 0
        for index, arg in self._moved:
            tensor = args[index]
            if tensor is None:
                continue
            if tensor.on_host:
                loaded += tensor.nbytes * arg.reads
                stored += tensor.nbytes * arg.writes
            else:
                device += tensor.nbytes * (arg.reads + arg.writes)
        return device, loaded, stored

    def formats(self, args: tuple) -> str:
        return formats(x for x, arg in zip(args, self.declared, strict=True) if arg.pointer)


def formats(tensors: Iterable[Tensor | None]) -> str:
    """Return the tensors' dtype names, separated by commas; "-" for None."""
    return ",".join("-" if x is None else x.dtype.name for x in tensors)


class KernelSource(NamedTuple):
    """The source of one compilation: a kernel with its types and constants. file: path of the
    kernel file in llmq/cu. types: sorted pairs (type variable, dtype name). consts: sorted pairs
    (name, value), which become -DNAME=value."""

    file: str
    entry: str
    types: tuple[tuple[str, str], ...]
    consts: tuple[tuple[str, int], ...]

    @classmethod
    def of(
        cls, kernel: Kernel, types: dict[str, DType], consts: dict[str, int] | None
    ) -> KernelSource:
        """Return the source for a launch with these dtypes of type variables."""
        consts = consts or {}
        return _source(kernel.file, kernel.entry, tuple(types.items()), tuple(consts.items()))

    def __str__(self) -> str:
        return " ".join(
            [self.entry, *(f"{name}={value}" for name, value in self.types + self.consts)]
        )


@cache  # all launches need the same few hundred sources
def _source(
    file: str, entry: str, types: tuple[tuple[str, DType], ...], consts: tuple[tuple[str, int], ...]
) -> KernelSource:
    names = sorted((variable, dtype.name) for variable, dtype in types)
    return KernelSource(file, entry, tuple(names), tuple(sorted(consts)))


def expect(op: str, name: str, tensor: Tensor, dtype: DType | None, shape: tuple) -> None:
    """Raise TypeError or ValueError unless the tensor has this dtype (None: any) and shape."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {tensor!r}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype.label}, got {tensor.dtype.label}")
    if tensor.shape != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tensor.shape}")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
