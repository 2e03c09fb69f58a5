"""Declarations state access, dtype and shape of each argument of a kernel, and launches are checked
against the declarations. An argument is declared as a tensor or a number:

    [sparse | boxN] [out | inout] TYPE[DIMENSIONS][?] NAME      a tensor
    TYPE NAME                                                   a number

A tensor is read-only, unless the declaration says `out` or `inout`. `?` means that None is allowed.
`box64` passes the matrix to the kernel as a TensorMap (cu/ptx.cuh), for copies of boxes of 64 rows.
`sparse` says that a launch touches few of the tensor's elements, so that the tensor does not count
as traffic.

TYPE is a dtype or a type variable, which is one capital letter. A launch binds the variable to the
dtype of its tensors, which must be equal. The letter Q stands for an fp8 dtype, O for an fp8 dtype
other than E5M2, and any other letter for F32 or BF16, unless the kernel's `types` says something
else, such as `T=bf16, U=e4m3|e5m2`.

Dimensions are separated by commas. `rows` is a size that is equal in all arguments, and equal to
the number argument `rows` if there is one. `2*F` is a multiple of the size F. `*rows`, allowed as
the first dimension, stands for any number of dimensions whose product is `rows`. Any other
dimension is an expression of these names, such as `K if trans_a else M`. In expressions,
`padded(n)` is n rounded up to a multiple of 16, and `vector_T` is the number of elements of type T
in 16 bytes.

Rules compare such expressions and are separated by commas: `C % 8` (C is a multiple of 8), `C <=
8192`, `k >= 1`. A rule does not apply if one of its arguments is None.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import CodeType
from typing import Any, NamedTuple

from llmq.base.dtypes import BF16, DTYPES, E4M3, E4M3_HALF, F32, FP8, DType
from llmq.base.operand import CODES_MULTIPLE
from llmq.base.tensor import POINTER_ALIGN, Tensor

# SCALARS has the Python types of the values that a number of each scalar type accepts.
SCALARS: dict[str, type | tuple[type, ...]] = {
    "i32": int,
    "u32": int,
    "i64": int,
    "f32": (float, int),
    "f64": (float, int),
}
TYPES = {"Q": FP8, "O": (E4M3, E4M3_HALF)}
"""The dtypes that a type variable allows; variables that are not listed allow FLOATS."""
FLOATS = (F32, BF16)

_ARG = re.compile(r"^(?:(sparse|box\d+) )?(?:(out|inout) )?(\w+)(?:\[(.*)\](\?)?)? (\w+)$")
_NAMED = re.compile(r"^(?:\*|(\d+)\*)?([A-Za-z_]\w*)$")
_RULE = re.compile(r"^(.+) (==|%|<=|>=) (.+)$")


def _padded(n: int) -> int:
    """Return n rounded up to a multiple of CODES_MULTIPLE (16 codes, 16 bytes), as
    `base.operand.turned` pads."""
    return -(-n // CODES_MULTIPLE) * CODES_MULTIPLE


_FUNCTIONS = {"__builtins__": {}, "padded": _padded, "max": max}


def _split(text: str) -> list[str]:
    """Return the parts of the text between commas that stand outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _value(code: CodeType, sizes: Mapping[str, Any]) -> int | None:
    """Return the expression's value; None if `sizes` lacks a name in the expression."""
    if all(name in sizes or name in _FUNCTIONS for name in code.co_names):
        return eval(code, _FUNCTIONS, sizes)
    return None


class Dimension(NamedTuple):
    """One dimension of a declared shape: `factor` times the size `name`; or the product `name` of
    the leading dimensions; or, with name "", an expression."""

    text: str
    name: str
    factor: int
    code: CodeType

    @classmethod
    def of(cls, text: str) -> Dimension:
        """Parse the text of a dimension."""
        match = _NAMED.match(text)
        factor, name = match.groups() if match else (None, "")
        return cls(text, name, int(factor or 1), compile(text.lstrip("*"), text, "eval"))

    @property
    def leading(self) -> bool:
        """True if the dimension stands for any number of leading dimensions."""
        return self.text.startswith("*")


@dataclass(frozen=True, slots=True)
class Arg:
    """One declared argument of a kernel. dtype: a tensor's dtype; None for a number or a type
    variable. shape: a tensor's dimensions; None for a number. box_rows: number of rows of a
    TensorMap's box; 0: the kernel gets the tensor's address."""

    name: str
    type: str
    dtype: DType | None
    shape: tuple[Dimension, ...] | None
    optional: bool
    reads: bool
    writes: bool
    box_rows: int
    sparse: bool

    @classmethod
    def of(cls, text: str) -> Arg:
        """Parse an argument; ValueError if the text is not an argument."""
        match = _ARG.match(text)
        if match is None:
            raise ValueError(f"kernel argument {text!r} is not `[out|inout] type[shape][?] name`")
        word, access, type_, shape, optional, name = match.groups()
        if shape is None:
            if type_ not in SCALARS or word or access:
                raise ValueError(f"kernel argument {text!r}: {type_} is not a scalar type")
        elif type_ not in DTYPES and not (len(type_) == 1 and type_.isupper()):
            raise ValueError(f"kernel argument {text!r}: {type_} is not a dtype")
        return cls(
            name=name,
            type=type_,
            dtype=None if shape is None else DTYPES.get(type_),
            shape=None if shape is None else tuple(map(Dimension.of, _split(shape))),
            optional=optional is not None,
            reads=shape is not None and access != "out",
            writes=access is not None,
            box_rows=int(word[3:]) if (word or "").startswith("box") else 0,
            sparse=word == "sparse",
        )

    @property
    def pointer(self) -> bool:
        """True if the argument is a tensor."""
        return self.shape is not None

    @property
    def is_type_variable(self) -> bool:
        """True if each launch binds the dtype."""
        return len(self.type) == 1


_COMPARISONS = {
    "==": (operator.eq, "equal to"),
    "%": (lambda value, bound: value % bound == 0, "a multiple of"),
    "<=": (operator.le, "at most"),
    ">=": (operator.ge, "at least"),
}


class Rule(NamedTuple):
    """A condition that sizes must satisfy. of_gpu: True if only GPUs need the condition; references
    take any size."""

    text: str
    left: CodeType
    comparison: str
    right: CodeType
    of_gpu: bool

    @classmethod
    def of(cls, text: str, of_gpu: bool) -> Rule:
        """Parse a rule; ValueError if the text is not a rule."""
        match = _RULE.match(text)
        if match is None:
            raise ValueError(f"rule {text!r} is not `expression ==, %, <= or >= expression`")
        left, comparison, right = match.groups()
        return cls(
            left, compile(left, left, "eval"), comparison, compile(right, right, "eval"), of_gpu
        )

    def check(self, entry: str, sizes: Mapping[str, Any]) -> None:
        """Raise ValueError if these sizes break the rule. entry: name of the kernel, for the
        message."""
        value, bound = _value(self.left, sizes), _value(self.right, sizes)
        if value is None or bound is None:
            return
        holds, wanted = _COMPARISONS[self.comparison]
        if not holds(value, bound):
            where = " on a GPU" if self.of_gpu else ""
            raise ValueError(f"{entry}: {self.text} must be {wanted} {bound}{where}, got {value}")


MOST_KNOWN = 1024  # number of combinations of dtypes and sizes that a declaration remembers


class Declaration:
    """The arguments of one kernel and the rules of their sizes, parsed once. The declaration
    remembers dtypes and sizes that passed the check, so that repeated launches skip it."""

    def __init__(self, entry: str, args: str, where: str, gpu: str, types: str):
        """args, where (rules), gpu (rules for GPUs only), types (dtypes of type variables): texts
        in the syntax of this module's docstring. Raises ValueError if a text cannot be parsed."""
        self.entry, self.types = entry, dict(TYPES)
        for letter, names in (text.split("=") for text in _split(types)):
            self.types[letter] = tuple(DTYPES[name] for name in names.split("|"))
        self.args = tuple(map(Arg.of, _split(args)))
        self.rules = [Rule.of(text, False) for text in _split(where)]
        self.rules += [Rule.of(text, True) for text in _split(gpu)]
        self._tensors = [i for i, arg in enumerate(self.args) if arg.pointer]
        self._numbers = [(i, SCALARS[a.type]) for i, a in enumerate(self.args) if not a.pointer]
        used = {name for arg in self.args for dim in arg.shape or () for name in dim.code.co_names}
        used |= {name for rule in self.rules for name in rule.left.co_names + rule.right.co_names}
        named = {dim.name for arg in self.args for dim in arg.shape or ()}
        named |= {arg.name for arg in self.args if not arg.pointer}
        named |= {f"vector_{arg.type}" for arg in self.args if arg.is_type_variable}
        if unknown := used - named - _FUNCTIONS.keys():
            raise ValueError(f"{entry}: no argument has {', '.join(sorted(unknown))}")
        self._sizes = [i for i, _ in self._numbers if self.args[i].name in used]
        self._known: dict[tuple, Any] = {}

    def check(self, args: tuple, on_gpu: bool) -> dict[str, DType]:
        """Check the arguments of a launch; return the dtypes of type variables. Raises TypeError or
        ValueError if an argument does not fit."""
        if len(args) != len(self.args):
            raise TypeError(f"{self.entry}: {len(args)} arguments given, {len(self.args)} declared")
        for i, types in self._numbers:
            if not isinstance(args[i], types):
                arg = self.args[i]
                raise TypeError(f"{self.entry}: {arg.name} must be {arg.type}, got {args[i]!r}")
        tensors = [args[i] for i in self._tensors]
        kinds = [x.kind if type(x) is Tensor else type(x) for x in tensors]
        key = (on_gpu, *[args[i] for i in self._sizes], *kinds)
        types = self._known.get(key)
        if types is None:
            sizes = {self.args[i].name: args[i] for i, _ in self._numbers}
            given = zip([self.args[i] for i in self._tensors], tensors, strict=True)
            types = self._fit(list(given), sizes, on_gpu)
            self._remember(key, types)
        return types

    def dims(self, given: Mapping[str, Tensor | int]) -> tuple[int, ...]:
        """Return the sizes of the dimensions named in the shapes of these tensors, in order of
        first appearance, except sizes given as numbers. Raises TypeError or ValueError if tensors
        do not fit."""
        values = given.values()
        kinds = [x.kind if type(x) is Tensor else x if type(x) is int else None for x in values]
        key = (*given, *kinds)
        dims = self._known.get(key)
        if dims is None:
            by_name = {arg.name: arg for arg in self.args}
            pairs = [(by_name[name], value) for name, value in given.items()]
            sizes: dict[str, Any] = {arg.name: value for arg, value in pairs if not arg.pointer}
            tensors = [(arg, value) for arg, value in pairs if arg.pointer]
            self._fit(tensors, sizes, on_gpu=False, complete=False)
            names = (dim.name for arg, _ in tensors for dim in arg.shape if dim.name)
            dims = tuple(sizes[name] for name in dict.fromkeys(names) if name not in given)
            self._remember(key, dims)
        return dims

    def _remember(self, key: tuple, value: Any) -> None:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[key] = value

    def _fit(
        self,
        pairs: list[tuple[Arg, Tensor | None]],
        sizes: dict[str, Any],
        on_gpu: bool,
        *,
        complete: bool = True,
    ) -> dict[str, DType]:
        """Return the dtypes of type variables, and add the tensors' dimensions to `sizes`. Tensors
        that the kernel reads come first and set the sizes; another tensor that does not fit raises
        TypeError or ValueError. complete: True if all arguments are given and therefore all sizes
        are known."""
        types: dict[str, DType] = {}
        given = [(arg, x) for arg, x in pairs if self._is_given(arg, x, on_gpu)]
        given.sort(key=lambda pair: (not pair[0].reads, pair[0].writes))
        for arg, tensor in given:
            allowed = (arg.dtype,) if arg.dtype else self.types.get(arg.type, FLOATS)
            allowed = (types[arg.type],) if arg.type in types else allowed
            if tensor.dtype not in allowed:
                labels = " or ".join(dtype.label for dtype in allowed)
                raise TypeError(self._unfit(arg, tensor, f"be {labels}", tensor.dtype.label))
            if arg.is_type_variable:
                types[arg.type] = tensor.dtype
                sizes[f"vector_{arg.type}"] = POINTER_ALIGN // tensor.dtype.itemsize
        for arg, tensor in given:
            self._name_sizes(arg, tensor, sizes)
        for arg, tensor in given:
            self._expect_shape(arg, tensor, sizes, complete)
        for rule in self.rules:
            if on_gpu or not rule.of_gpu:
                rule.check(self.entry, sizes)
        return types

    def _is_given(self, arg: Arg, tensor: Tensor | None, on_gpu: bool) -> bool:
        """False if the tensor is None and None is allowed; raises for a value that no kernel can
        read or write."""
        if tensor is None and arg.optional:
            return False
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{self.entry}: {arg.name} must be a tensor, got {tensor!r}")
        if on_gpu and tensor.ptr % POINTER_ALIGN:
            raise ValueError(f"{self.entry}: {arg.name} is not {POINTER_ALIGN}-byte aligned")
        if not tensor.direct:
            where = tensor.storage.place
            raise TypeError(f"{self.entry}: no kernel reaches {arg.name}, which is {where}")
        row_bytes = tensor.shape[-1] * tensor.dtype.itemsize if tensor.shape else 0
        if arg.box_rows and (len(tensor.shape) != 2 or row_bytes % POINTER_ALIGN):
            raise ValueError(
                f"{self.entry}: {arg.name} must be a matrix with rows of a multiple of "
                f"{POINTER_ALIGN} bytes, got {tensor.shape}"
            )
        return True

    def _name_sizes(self, arg: Arg, tensor: Tensor, sizes: dict[str, Any]) -> None:
        """Add to `sizes` the named sizes of the declared shape that `sizes` does not have."""
        dims, shape = arg.shape, tensor.shape
        if dims and dims[0].leading and len(shape) >= len(dims) - 1:
            count = len(shape) - len(dims) + 1
            leading, shape, first, dims = shape[:count], shape[count:], dims[0], dims[1:]
            sizes.setdefault(first.text, leading)
            sizes.setdefault(first.name, prod(leading))
        if len(shape) == len(dims):
            for dim, size in zip(dims, shape, strict=True):
                if dim.name and size % dim.factor == 0:
                    sizes.setdefault(dim.name, size // dim.factor)

    def _expect_shape(
        self, arg: Arg, tensor: Tensor, sizes: Mapping[str, Any], complete: bool
    ) -> None:
        shape: list[Any] = []
        for place, dim in zip(range(-len(arg.shape), 0), arg.shape, strict=True):
            size = _value(dim.code, sizes)
            if size is None and not complete and dim.name == "" and len(tensor.shape) >= -place:
                size = tensor.shape[place]
            leading = sizes.get(dim.text, ()) if dim.leading else (size,)
            known = size is not None and prod(leading) == size
            shape += leading if known else [dim.text if size is None else f"*{size}"]
        if tensor.shape != tuple(shape):
            expected = str(tuple(shape)).replace("'", "")
            raise ValueError(self._unfit(arg, tensor, f"have shape {expected}", tensor.shape))

    def _unfit(self, arg: Arg, tensor: Tensor, expected: str, given: Any) -> str:
        """Return the message about a tensor that does not fit, with the tensor's own name."""
        named = "" if tensor.name == arg.name else f" ({tensor.name})"
        return f"{self.entry}: {arg.name} must {expected}, got {given}{named}"
