"""GaLore's own kernels: eigenvectors of small matrices, and replacement of a projection.

A projection consists of the leading singular vectors of a gradient. The rule finds these vectors by
products and eigenvectors of small matrices (`llmq/state/rules/galore.py`).
"""

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.runtime.cost import Cost
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

EIGEN_THREADS = 1024
THREADS = 256
MOST_ROWS = 6000  # most rows of a matrix, each with 8 bytes of shared memory
SWEEPS = 6  # sweeps of Jacobi's rotations that a matrix takes, about

EIGEN = Kernel(
    "update/galore.cu",
    "galore_eigen",
    "inout f32[count,side,side] s, out f32[count,side,side] v, i32 roots, i32 side",
    where=f"side <= {MOST_ROWS}",
)
RENEW = Kernel(
    "update/galore.cu",
    "galore_renew",
    "inout D[*n] projection, f32[*n] x, i32[16] scalars, i64 n",
)


def eigen(dev: Device, s: Tensor, *, roots: bool = False) -> None:
    """Replace symmetric matrices by their eigenvectors, as rows in the order of falling
    eigenvalues.

    Signs of vectors are arbitrary. roots: True to divide each vector by the root of its eigenvalue,
    which is taken as at least 2^-40 of the largest eigenvalue. If s = x x^T, the rows of (result @
    x) then are orthonormal, up to rounding relative to the largest singular value of x. With roots
    a matrix of zeros stays zero.

    s: F32 (count, side, side), with nonnegative eigenvalues.

    Cost:    about 9 * side^3 FLOPs per sweep; one thread block for each matrix.
    """
    count, side = EIGEN.dims(s=s)
    smem = 8 * (side + side % 2)
    with dev.scratch("vectors", s.shape, F32) as v:
        cost = Cost(flops=9 * SWEEPS * count * side**3)
        args = (s, v, int(roots), side)
        dev.launch(EIGEN, count, EIGEN_THREADS, args, smem=smem, cost=cost)


def renew(dev: Device, projection: Tensor, x: Tensor, scalars: Tensor) -> None:
    """projection = x, rounded to nearest; nothing changes if scalars.skip_update is set."""
    n = x.size
    dev.launch(RENEW, ceil_div(n, THREADS), THREADS, (projection, x, scalars, n))
