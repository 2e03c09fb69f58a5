"""Kernel declarations: an entry point with typed arguments that are checked on every device."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from llmq.base.dtypes import DTYPES, DType
from llmq.base.tensor import Tensor

# Python values of scalar types may be these.
SCALARS: dict[str, type | tuple[type, ...]] = {
    "i32": int,
    "u32": int,
    "i64": int,
    "f32": (float, int),
    "f64": (float, int),
}
POINTER_ALIGN = 16  # bytes: kernels use 16-byte accesses

# Type variables of each kernel file, over all its declared entry points: one compilation defines
# all of them, also those that the launched entry does not use.
TYPE_VARIABLES: defaultdict[str, set[str]] = defaultdict(set)

_ARG = re.compile(r"^(sparse )?(?:(const|inout) )?(\w+)(?:\[(\d+)\])?(\*\??)? (\w+)$")


@dataclass(frozen=True, slots=True)
class Arg:
    """One declared argument: `const bf16* x`, `inout T* y`, `f32* rstd`, `T*? bias`, `i64 n`.
    `const T[128]* x`: a matrix that the kernel gets as a TensorMap (cu/ptx.cuh), for copies of
    boxes of 128 of its rows. `sparse const T* x`: of which a launch reads little, so that it does
    not count as traffic."""

    name: str
    type: str  # a dtype name, a scalar type, or a type variable (one capital letter)
    dtype: DType | None  # of a tensor, None if the type is a variable
    pointer: bool
    optional: bool
    reads: bool
    writes: bool
    box_rows: int  # of a TensorMap; 0: the kernel gets the tensor's address
    sparse: bool

    @property
    def is_type_variable(self) -> bool:
        """Whether the type is bound at launch."""
        return len(self.type) == 1


def _parse(text: str) -> Arg:
    match = _ARG.match(text.strip())
    if match is None:
        raise ValueError(
            f"kernel argument {text!r} is not `[sparse] [const|inout] type[*[?]] name`"
        )
    sparse, access, type_, box_rows, star, name = match.groups()
    pointer = star is not None
    if box_rows and not pointer:
        raise ValueError(f"kernel argument {text!r}: only tensors have boxes")
    if not pointer and type_ not in SCALARS:
        raise ValueError(f"kernel argument {text!r}: {type_} is not a scalar type")
    if pointer and type_ not in DTYPES and not (len(type_) == 1 and type_.isupper()):
        raise ValueError(f"kernel argument {text!r}: {type_} is not a dtype")
    return Arg(
        name=name,
        type=type_,
        dtype=DTYPES.get(type_) if pointer else None,
        pointer=pointer,
        optional=star == "*?",
        reads=pointer and access is not None,
        writes=access != "const",
        box_rows=int(box_rows or 0),
        sparse=sparse is not None,
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry point of llmq/cu/<file>, or of a library when file has no `.cu` ending. The
    reference of the entry is the function of the same name in llmq/ref/<file>.py. A one-letter type
    is a type variable: bound by its tensors at launch, all of one dtype, and passed to the compiler
    as -D<letter>=<type>. capability: the only one, times 10, that has the instructions; None: all
    that are supported."""

    file: str
    entry: str
    args: str
    capability: int | None = None
    declared: tuple[Arg, ...] = field(init=False, compare=False)
    _moved: tuple[tuple[int, Arg], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        declared = tuple(_parse(text) for text in self.args.split(","))
        object.__setattr__(self, "declared", declared)
        moved = [(i, a) for i, a in enumerate(declared) if a.pointer and not a.sparse]
        moved = [(i, a) for i, a in moved if a.name != "workspace"]
        object.__setattr__(self, "_moved", tuple(moved))
        TYPE_VARIABLES[self.file].update(a.type for a in declared if a.is_type_variable)

    @property
    def op(self) -> str:
        """The operation this entry belongs to: the stem of its file."""
        return self.module.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The operation's module below llmq.ops and llmq.ref, with its room: product.matmul."""
        return self.file.removesuffix(".cu").replace("/", ".")

    def bind(self, args: tuple, *, aligned: bool = True) -> dict[str, DType]:
        """Check the arguments against the declaration; returns the type variables' dtypes.
        aligned: tensors must begin at multiples of POINTER_ALIGN, as GPUs need them."""
        if len(args) != len(self.declared):
            raise TypeError(
                f"{self.entry}: {len(args)} arguments given, {len(self.declared)} declared"
            )
        types: dict[str, DType] = {}
        for arg, value in zip(self.declared, args, strict=True):
            if not arg.pointer:
                if not isinstance(value, SCALARS[arg.type]):
                    raise TypeError(f"{self.entry}: {arg.name} must be {arg.type}, got {value!r}")
            elif isinstance(value, Tensor):
                expected = arg.dtype or types.setdefault(arg.type, value.dtype)
                if value.dtype is not expected:
                    given = value.dtype.label
                    raise TypeError(
                        f"{self.entry}: {arg.name} must be {expected.label}, got {given}"
                    )
                if aligned and value.ptr % POINTER_ALIGN:
                    raise ValueError(
                        f"{self.entry}: {arg.name} is not {POINTER_ALIGN}-byte aligned"
                    )
                if not value.direct:
                    where = value.storage.place
                    raise TypeError(f"{self.entry}: no kernel reaches {arg.name}, which is {where}")
                if arg.box_rows:
                    _expect_map(f"{self.entry}: {arg.name}", value)
            elif value is not None or not arg.optional:
                raise TypeError(f"{self.entry}: {arg.name} must be a tensor, got {value!r}")
        return types

    def traffic(self, args: tuple) -> tuple[int, int, int]:
        """Bytes that one launch must move: of device memory, from host memory, and to it. Each
        tensor is read once and written once as declared. A `sparse` one, of which few elements are
        touched, does not count, nor does a `workspace`: how much of it a library uses is not
        known."""
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
    """Their names, with commas between them, and "-" for each tensor that is not given."""
    return ",".join("-" if x is None else x.dtype.name for x in tensors)


def _expect_map(what: str, tensor: Tensor) -> None:
    """Raise ValueError unless a TensorMap can describe it."""
    shape = tensor.shape
    if len(shape) != 2 or shape[1] * tensor.dtype.itemsize % POINTER_ALIGN:
        raise ValueError(
            f"{what} must be a matrix with rows of a multiple of {POINTER_ALIGN} bytes, got {shape}"
        )


class KernelSource(NamedTuple):
    """The source of one compilation, which makes machine code of a kernel with types and constants.
    file: of llmq/cu. types: names by type variable. consts: -DNAME=value. Both sorted."""

    file: str
    entry: str
    types: tuple[tuple[str, str], ...]
    consts: tuple[tuple[str, int], ...]

    @classmethod
    def of(
        cls, kernel: Kernel, types: dict[str, DType], consts: dict[str, int] | None
    ) -> KernelSource:
        """The source for a launch with these types of its variables."""
        given = tuple(types.items()), tuple((consts or {}).items())
        return _source(kernel.file, kernel.entry, *given)

    def __str__(self) -> str:
        return " ".join(
            [self.entry, *(f"{name}={value}" for name, value in self.types + self.consts)]
        )


@cache  # the same few hundred, launch after launch
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
