"""Muon's own kernels: proposal of a change, its normalization, and its application.

A matrix changes by its orthogonalized momentum: Newton-Schulz iteration makes all singular values
about 1, with products in `llmq/state/rules/muon.py`. Kernels compute in F32.
"""

from llmq.base.dtypes import F32, F64
from llmq.base.tensor import POINTER_ALIGN, Tensor
from llmq.ops.common import expect_scale
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 128
PER_THREAD = 8  # elements of a thread: one 16-byte access of BF16, two accesses of F32
MATRIX_THREADS = 256
BLOCKS_PER_SM = 8  # number of thread blocks that fill a multiprocessor

_PART = "n % 128, n >= 1, first % 128, first >= 0"
PROPOSE = Kernel(
    "update/muon.cu",
    "muon_propose",
    "out bf16[n] change, G[n] grad, inout M[n] m, inout f32[n//128]? m_scale, i32[16] scalars, "
    "f32 one_minus_momentum, u32 salt, i64 first, i64 n",
    where=_PART,
    types="M=f32|bf16|e4m3",
)
SQUARES = Kernel(
    "update/muon.cu",
    "muon_squares",
    "out f64[count,blocks] partials, bf16[count,rows,columns] x, i64 n",
    where="n == rows*columns, n >= 1",
)
NORMALIZE = Kernel(
    "update/muon.cu",
    "muon_normalize",
    "out bf16[count,rows,columns] out, bf16[count,rows,columns] x, "
    "f64[count,num_partials] partials, i32 num_partials, i64 n",
    where="n == rows*columns",
)
DIAGONAL = Kernel(
    "update/muon.cu",
    "muon_diagonal",
    "sparse inout bf16[count,side,side] x, f32 value, i32 side, i32 count",
)
ROW_FACTORS = Kernel(
    "update/muon.cu",
    "muon_row_factors",
    "out f32[count,rows] factors, inout f32[shift + count*rows] v, f64[count,rows] squares, "
    "f32 one_minus_decay, i32 columns, i32 rows, i32 shift",
)
ROW_SCALE = Kernel(
    "update/muon.cu",
    "muon_row_scale",
    "inout bf16[count,rows,columns] x, f32[count,rows] factors, i32 columns",
)
APPLY = Kernel(
    "update/muon.cu",
    "muon_apply",
    "inout P[n] param, out bf16[n]? work, D[n] change, i32[16] scalars, f32 lr_scale, "
    "f32 weight_decay, u32 salt, i64 first, i64 n",
    where=_PART,
)


def propose(
    dev: Device,
    change: Tensor,
    grad: Tensor,
    m: Tensor,
    scalars: Tensor,
    *,
    momentum: float,
    salt: int,
    first: int = 0,
    m_scale: Tensor | None = None,
) -> None:
    """Update the momentum of a part of a slab, and propose a change of its matrices.

        g = grad_scale * grad       m = m + (1 - momentum) * (g - m)
        change = m + (1 - momentum) * (g - m), with the new m before rounding

    BF16 and E4M3 m are rounded stochastically, with the same random bits as in AdamW. If
    scalars.skip_update is set, m stays and the change is 0.

    grad: unscaled sum over tokens. m: zero at the start; with scales if E4M3. scalars: StepScalars.
    salt: distinguishes this slab's random numbers. first: the part's first element in the slab.
    """
    expect_scale("muon", "m", m, m_scale)
    n = change.size
    args = (change, grad, m, m_scale, scalars, 1.0 - momentum, salt, first, n)
    dev.launch(PROPOSE, ceil_div(n, THREADS * PER_THREAD), THREADS, args, cost=Cost(flops=7 * n))


def normalize(dev: Device, out: Tensor, x: Tensor) -> None:
    """Divide matrices by their Frobenius norms, rounded to BF16 as in torch.

    out may be x.

    Cost:    reads x twice, writes out once; two launches.
    """
    count, rows, columns = NORMALIZE.dims(x=x)
    n = rows * columns
    most = ceil_div(BLOCKS_PER_SM * dev.num_sms, count)
    blocks = min(ceil_div(n, MATRIX_THREADS * PER_THREAD), most)
    with dev.scratch("squares", (count, blocks), F64) as partials:
        grid = (count, blocks)
        dev.launch(SQUARES, grid, MATRIX_THREADS, (partials, x, n), cost=Cost(flops=2 * x.size))
        args = (out, x, partials, blocks, n)
        dev.launch(NORMALIZE, grid, MATRIX_THREADS, args, cost=Cost(flops=x.size))


def diagonal(dev: Device, x: Tensor, value: float) -> None:
    """x[i] += value * identity, for each matrix x[i].

    Cost:    one 32-byte sector of memory per diagonal element; one launch.
    """
    count, side = DIAGONAL.dims(x=x)
    numbers = count * side
    dev.launch(
        DIAGONAL,
        ceil_div(numbers, MATRIX_THREADS),
        MATRIX_THREADS,
        (x, value, side, count),
        cost=Cost(flops=numbers),
    )


def even(dev: Device, x: Tensor, v: Tensor, *, decay: float) -> None:
    """Scale rows towards equal shares of their matrix's norm, as NorMuon does (arXiv 2510.05491).

        v = decay * v + (1 - decay) * mean square of a row      x = c * x / (sqrt(v) + 1e-10)

    with the factor c that keeps each matrix's norm. For a matrix of zeros, x and v stay.

    v: zero at the start; may begin at any element.

    Cost:    reads x twice and writes x once; three launches.
    """
    count, rows, columns = ROW_SCALE.dims(x=x)
    of_rows = (count, rows)
    with dev.scratch("squares", of_rows, F64) as squares, dev.scratch("f", of_rows, F32) as factors:
        each = count * rows
        _squares(dev, squares.view(each, 1), x.view(each, 1, columns), (each, 1))
        before, shift = _aligned(v)
        args = (factors, before, squares, 1.0 - decay, columns, rows, shift)
        dev.launch(ROW_FACTORS, count, MATRIX_THREADS, args, cost=Cost(flops=10 * v.size))
        args, cost = (x, factors, columns), Cost(flops=x.size)
        dev.launch(ROW_SCALE, each, MATRIX_THREADS, args, cost=cost)


def _aligned(x: Tensor) -> tuple[Tensor, int]:
    """Return x extended to the left, so that it begins at an address that kernels accept, and the
    number of added elements."""
    shift = x.ptr % POINTER_ALIGN // x.dtype.itemsize
    offset = x.offset - shift * x.dtype.itemsize
    return Tensor(x.name, (shift + x.size,), x.dtype, x.storage, offset), shift


def _squares(dev: Device, partials: Tensor, x: Tensor, grid: tuple[int, int]) -> None:
    """Write partial sums of squares of matrices. grid: (number of matrices, partial sums of each
    matrix)."""
    n, cost = x.size // x.shape[0], Cost(flops=2 * x.size)
    dev.launch(SQUARES, grid, MATRIX_THREADS, (partials, x, n), cost=cost)


def apply(
    dev: Device,
    param: Tensor,
    work: Tensor | None,
    change: Tensor,
    scalars: Tensor,
    *,
    lr_scale: float,
    weight_decay: float,
    salt: int,
    first: int = 0,
) -> None:
    """Change the parameters in a part of a slab.

        lr = lr_scale * scalars.lr      param = param - (lr * change + lr * weight_decay * param)

    BF16 param is rounded stochastically, with the same random bits as in AdamW. If
    scalars.skip_update is set, nothing changes.

    work: out, param rounded to nearest; or None. scalars, salt, first: see propose.
    """
    n = change.size
    hyper = (float(lr_scale), float(weight_decay))
    args = (param, work, change, scalars, *hyper, salt, first, n)
    dev.launch(APPLY, ceil_div(n, THREADS * PER_THREAD), THREADS, args, cost=Cost(flops=4 * n))
