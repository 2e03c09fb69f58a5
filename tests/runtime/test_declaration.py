"""Declared dtypes, shapes and rules of kernels' arguments: parsing, and the errors of launches."""

import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.tensor import Storage, Tensor
from llmq.runtime.kernel import Kernel

STORAGE = Storage("device", base=1 << 12)
NORM = Kernel(
    "a.cu",
    "norm",
    "out T[rows,C] out, out f32[rows]? mean, T[rows,C] x, T[C] weight, "
    "out Q[C,padded(rows)]? codes, i64 rows, i32 C",
    where="C % 4",
    gpu="C % vector_T, C <= 64, rows >= 2",
)
GLU = Kernel("a.cu", "glu", "out T[*rows,F] out, T[*rows,2*F] x, f32[rows]? w, i64 rows, i32 F")
PRODUCT = Kernel(
    "a.cu",
    "product",
    "out D[M,N] out, S[K if trans_a else M, M if trans_a else K] a, i32 M, i32 N, i32 K, "
    "i32 trans_a",
    types="D=f32",
)


def tensor(*shape, dtype=BF16):
    return Tensor("x", shape, dtype, STORAGE, 0)


def of_norm(rows=6, C=16, **changes):
    args = {"out": tensor(6, 16), "mean": None, "x": tensor(6, 16), "weight": tensor(16)}
    return tuple((args | {"codes": None, "rows": rows, "C": C} | changes).values())


def test_arguments_that_fit():
    for _ in range(2):  # the second time they are known
        assert NORM.bind(of_norm()) == {"T": BF16}
    codes = tensor(16, 16, dtype=E4M3)
    assert NORM.bind(of_norm(mean=tensor(6, dtype=F32), codes=codes)) == {"T": BF16, "Q": E4M3}
    for shape in ((8,), (2, 8), (3, 2, 8)):
        rows = tensor(*shape).size // 8
        args = (tensor(*shape), tensor(*shape[:-1], 16), tensor(rows, dtype=F32), rows, 8)
        assert GLU.bind(args) == {"T": BF16}
    assert PRODUCT.bind((tensor(2, 3, dtype=F32), tensor(5, 2), 2, 3, 5, 1))
    assert PRODUCT.bind((tensor(2, 3, dtype=F32), tensor(2, 5), 2, 3, 5, 0))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": None}, TypeError, "norm: x must be a tensor, got None"),
        ({"x": [1]}, TypeError, r"norm: x must be a tensor, got \[1\]"),
        ({"x": tensor(6, 16, dtype=I32)}, TypeError, "norm: x must be F32 or BF16, got I32"),
        ({"out": tensor(6, 16, dtype=F32)}, TypeError, "norm: out must be BF16, got F32"),
        ({"codes": tensor(16, 16)}, TypeError, "norm: codes must be .* or F8_E5M2, got BF16"),
        ({"x": tensor(96)}, ValueError, r"norm: x must have shape \(6, 16\), got \(96,\)"),
        ({"out": tensor(5, 16)}, ValueError, r"norm: out must have shape \(6, 16\), got \(5, 16\)"),
        ({"weight": tensor(6)}, ValueError, r"norm: weight must have shape \(16,\), got \(6,\)"),
        (
            {"codes": tensor(16, 6, dtype=E5M2)},
            ValueError,
            r"norm: codes must have shape \(16, 16\), got \(16, 6\)",
        ),
        ({"rows": 5}, ValueError, r"norm: x must have shape \(5, 16\), got \(6, 16\)"),
        ({"rows": 6.0}, TypeError, "norm: rows must be i64, got 6.0"),
    ],
)
def test_arguments_that_do_not_fit(changes, error, message):
    for _ in range(2):  # an error is not remembered
        with pytest.raises(error, match=message):
            NORM.bind(of_norm(**changes))


@pytest.mark.parametrize(
    ("rows", "C", "dtype", "message", "of_gpu"),
    [
        (4, 6, BF16, "norm: C must be a multiple of 4, got 6", False),
        (4, 12, BF16, "norm: C must be a multiple of 8 on a GPU, got 12", True),
        (4, 68, F32, "norm: C must be at most 64 on a GPU, got 68", True),
        (1, 8, BF16, "norm: rows must be at least 2 on a GPU, got 1", True),
    ],
)
def test_rules(rows, C, dtype, message, of_gpu):
    x = tensor(rows, C, dtype=dtype)
    args = (x, None, x, tensor(C, dtype=dtype), None, rows, C)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            NORM.bind(args)
    if of_gpu:
        assert NORM.bind(args, on_gpu=False)


def test_leading_dimensions_are_those_of_all():
    w = tensor(6, dtype=F32)
    with pytest.raises(ValueError, match=r"glu: out must have shape \(2, 3, 8\), got \(6, 8\)"):
        GLU.bind((tensor(6, 8), tensor(2, 3, 16), w, 6, 8))
    with pytest.raises(ValueError, match=r"glu: x must have shape \(\*6, 16\), got \(2, 2, 16\)"):
        GLU.bind((tensor(2, 2, 8), tensor(2, 2, 16), w, 6, 8))
    with pytest.raises(ValueError, match=r"glu: w must have shape \(6,\), got \(4,\)"):
        GLU.bind((tensor(6, 8), tensor(6, 16), tensor(4, dtype=F32), 6, 8))


def test_dimensions_by_name():
    for _ in range(2):
        assert NORM.dims(x=tensor(6, 16)) == (6, 16)
    assert GLU.dims(x=tensor(2, 3, 16)) == (6, 8)
    assert GLU.dims(x=tensor(6, 16), F=8) == (6,)
    with pytest.raises(ValueError, match=r"glu: x must have shape \(6, 18\), got \(6, 16\)"):
        GLU.dims(x=tensor(6, 16), F=9)
    with pytest.raises(ValueError, match="norm: C must be a multiple of 4, got 6"):
        NORM.dims(x=tensor(6, 6))
    assert PRODUCT.dims(out=tensor(2, 3, dtype=F32), a=tensor(5, 2)) == (2, 3)
    assert NORM.dims(weight=tensor(16), mean=tensor(6, dtype=F32)) == (16, 6)
    with pytest.raises(ValueError, match=r"norm: x must have shape \(rows, C\), got \(96,\)"):
        NORM.dims(x=tensor(96))
    with pytest.raises(ValueError, match=r"norm: weight must have shape \(16,\), got \(6,\)"):
        NORM.dims(x=tensor(6, 16), weight=tensor(6))
    with pytest.raises(ValueError, match=r"glu: x must have shape \(2\*F,\), got \(7,\)"):
        GLU.dims(x=tensor(7))
    with pytest.raises(TypeError, match="norm: x must be F32 or BF16, got I32"):
        NORM.dims(x=tensor(6, 16, dtype=I32))
    with pytest.raises(TypeError, match="norm: x must be a tensor, got None"):
        NORM.dims(x=None)


@pytest.mark.parametrize(
    ("args", "rules", "message"),
    [
        ("bf16 x", "", "bf16 is not a scalar type"),
        ("half[n] x", "", "half is not a dtype"),
        ("TT[n] x", "", "TT is not a dtype"),
        ("f32 [n] x", "", "is not `"),
        ("out i32 x", "", "i32 is not a scalar type"),
        ("T[n] x", "n < 3", "rule 'n < 3' is not"),
        ("T[n] x, T[m+1] y", "n % 2", "f: no argument has m"),
        ("T[n] x", "n <= most", "f: no argument has most"),
    ],
)
def test_bad_declarations(args, rules, message):
    with pytest.raises(ValueError, match=message):
        Kernel("bad.cu", "f", args, where=rules)
