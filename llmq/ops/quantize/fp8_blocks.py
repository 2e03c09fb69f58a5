"""E4M3 codes with a scale for each block of 128 rows and 128 columns, as in DeepSeek's files."""

from llmq.base.tensor import Tensor
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

THREADS = 256
DECODED = 16  # elements that a thread decodes
BLOCK = 128  # rows and columns that share a scale; BLOCK in cu/quantize/fp8_blocks.cu

ENCODE = Kernel(
    "quantize/fp8_blocks.cu",
    "fp8_blocks_encode",
    "out e4m3[rows,columns] codes, out f32[((rows+127)//128)*((columns+127)//128)] scales, "
    "T[rows,columns] x, i64 rows, i64 columns",
    where="columns % 16",
)
DECODE = Kernel(
    "quantize/fp8_blocks.cu",
    "fp8_blocks_decode",
    "out T[M,rows,columns] out, e4m3[M,rows,columns] codes, "
    "f32[M*((rows+127)//128)*((columns+127)//128)] scales, i64 rows, i64 columns",
    where="columns % 16",
)


def encode(dev: Device, codes: Tensor, scales: Tensor, x: Tensor) -> None:
    """Write the codes of x (rows, columns), and the scales of its blocks in row-major order."""
    rows, columns = x.shape
    grid = ceil_div(columns, BLOCK), ceil_div(rows, BLOCK)
    dev.launch(ENCODE, grid, THREADS, (codes, scales, x, rows, columns))


def decode(dev: Device, out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write decoded values to out, rounded to out's dtype. out, codes: (modules, rows, columns).

    Cost:    one byte read per element, out written; one launch.
    """
    modules, rows, columns = out.shape
    grid = ceil_div(rows * columns, THREADS * DECODED), modules
    dev.launch(DECODE, grid, THREADS, (out, codes, scales, rows, columns))
