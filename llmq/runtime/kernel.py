"""Kernel declarations: an entry point with typed arguments that are checked on every device."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from llmq.dtypes import DTYPES, DType
from llmq.runtime.tensor import Tensor

SCALARS = {"i32": int, "u32": int, "i64": int, "f32": float, "f64": float}
POINTER_ALIGN = 16  # bytes: kernels use 16-byte accesses

# Type variables of each kernel file, over all its declared entry points: one compilation defines
# all of them, also those that the launched entry does not use.
TYPE_VARIABLES: defaultdict[str, set[str]] = defaultdict(set)

_ARG = re.compile(r"^(?:(const|inout) )?(\w+)(\*\??)? (\w+)$")


@dataclass(frozen=True, slots=True)
class Arg:
    """One declared argument: `const bf16* x`, `inout T* y`, `f32* rstd`, `T*? bias`, `i64 n`."""

    name: str
    type: str  # a dtype name, a scalar type, or a type variable (one capital letter)
    pointer: bool
    optional: bool
    reads: bool
    writes: bool

    @property
    def is_type_variable(self) -> bool:
        """Whether the type is bound at launch."""
        return len(self.type) == 1


def _parse(text: str) -> Arg:
    match = _ARG.match(text.strip())
    if match is None:
        raise ValueError(f"kernel argument {text!r} is not `[const|inout] type[*[?]] name`")
    access, type_, star, name = match.groups()
    pointer = star is not None
    if not pointer and type_ not in SCALARS:
        raise ValueError(f"kernel argument {text!r}: {type_} is not a scalar type")
    if pointer and type_ not in DTYPES and not (len(type_) == 1 and type_.isupper()):
        raise ValueError(f"kernel argument {text!r}: {type_} is not a dtype")
    return Arg(
        name, type_, pointer, star == "*?", pointer and access is not None, access != "const"
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry point of llmq/cu/<file>, or of a library when file has no `.cu` ending.

    The reference of the entry is the function of the same name in llmq/ref/<stem of file>.py.
    A one-letter type is a type variable: bound by its tensors at launch, all of one dtype, and
    passed to the compiler as -D<letter>=<type>.
    """

    file: str
    entry: str
    args: str
    declared: tuple[Arg, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        declared = tuple(_parse(text) for text in self.args.split(","))
        object.__setattr__(self, "declared", declared)
        TYPE_VARIABLES[self.file].update(a.type for a in declared if a.is_type_variable)

    @property
    def op(self) -> str:
        """The operation this entry belongs to: the stem of its file."""
        return self.file.removesuffix(".cu")

    def bind(self, args: tuple) -> dict[str, DType]:
        """Check the arguments against the declaration; returns the type variables' dtypes."""
        if len(args) != len(self.declared):
            raise TypeError(
                f"{self.entry}: {len(args)} arguments given, {len(self.declared)} declared"
            )
        types: dict[str, DType] = {}
        for arg, value in zip(self.declared, args, strict=True):
            if arg.pointer:
                self._bind_pointer(arg, value, types)
            elif not isinstance(value, SCALARS[arg.type]) and not (
                arg.type in ("f32", "f64") and isinstance(value, int)
            ):
                raise TypeError(f"{self.entry}: {arg.name} must be {arg.type}, got {value!r}")
        return types

    def _bind_pointer(self, arg: Arg, value: object, types: dict[str, DType]) -> None:
        if value is None:
            if not arg.optional:
                raise TypeError(f"{self.entry}: {arg.name} must be a tensor, got None")
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.entry}: {arg.name} must be a tensor, got {value!r}")
        expected = DTYPES.get(arg.type) or types.setdefault(arg.type, value.dtype)
        if value.dtype != expected:
            raise TypeError(
                f"{self.entry}: {arg.name} must be {expected.label}, got {value.dtype.label}"
            )
        if value.ptr % POINTER_ALIGN:
            raise ValueError(f"{self.entry}: {arg.name} is not {POINTER_ALIGN}-byte aligned")

    def traffic(self, args: tuple) -> int:
        """Bytes that one launch must move: each tensor read once and written once as declared.

        A `workspace` does not count: how much of it a library uses is not known.
        """
        pairs = zip(self.declared, args, strict=True)
        return sum(
            v.nbytes * (a.reads + a.writes)
            for a, v in pairs
            if isinstance(v, Tensor) and a.name != "workspace"
        )


class Source(NamedTuple):
    """What one compilation makes machine code of: a file of llmq/cu with types and constants.

    types: names by type variable. consts: -DNAME=value. Both sorted.
    """

    file: str
    types: tuple[tuple[str, str], ...]
    consts: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kernel: Kernel, types: dict[str, DType], consts: dict[str, int] | None) -> Source:
        """Of a launch with these types of its variables."""
        names = tuple(sorted((variable, dtype.name) for variable, dtype in types.items()))
        return cls(kernel.file, names, tuple(sorted((consts or {}).items())))

    def __str__(self) -> str:
        return " ".join(
            [self.file, *(f"{name}={value}" for name, value in self.types + self.consts)]
        )


def expect(op: str, name: str, tensor: Tensor, dtype: DType | None, shape: tuple) -> None:
    """Raise TypeError or ValueError unless the tensor has this dtype (None: any) and shape."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {tensor!r}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype.label}, got {tensor.dtype.label}")
    if tensor.shape != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tensor.shape}")


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
