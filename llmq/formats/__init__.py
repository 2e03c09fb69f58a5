"""Number formats, one file each: bf16 and fp32, e4m3 (also in blocks), int8, ternary, nf4,
mxfp4, nvfp4.

`Operands` (`operands.py`) makes the operands of the products of a model's blocks, tensors or codes,
in forward, recompute and backward. `Storage` (`storage.py`) encodes, stores and decodes frozen
matrices.
"""

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, DType, parse_dtype
from llmq.base.tensor import Tensor
from llmq.formats.e4m3 import E4m3Operands, E4m3Storage, e4m3_of
from llmq.formats.e4m3_blocks import E4m3BlocksStorage
from llmq.formats.int8 import Int8Operands, Int8Storage
from llmq.formats.mxfp4 import Mxfp4Storage
from llmq.formats.nf4 import Nf4Storage
from llmq.formats.nvfp4 import Nvfp4Storage
from llmq.formats.operands import Operands
from llmq.formats.storage import Storage
from llmq.formats.ternary import TernaryOperands
from llmq.options.groups.precision import PrecisionOptions
from llmq.options.options import StepOptions
from llmq.runtime.device import Device

OPERANDS: dict[str, type[Operands]] = {
    "fp32": Operands,
    "bf16": Operands,
    "e4m3": E4m3Operands,
    "int8": Int8Operands,
    "ternary": TernaryOperands,
}
"""Class that makes operands, by --matmul-dtype."""

STORAGE: dict[str, type[Storage]] = {
    "e4m3": E4m3Storage,
    "int8": Int8Storage,
    "nf4": Nf4Storage,
    "mxfp4": Mxfp4Storage,
    "nvfp4": Nvfp4Storage,
    "e4m3-blocks": E4m3BlocksStorage,
}
"""Class that stores frozen matrices, by --base-dtype."""


def codes_of(precision: PrecisionOptions, dtype: str) -> DType | None:
    """Return the dtype of codes made of trained weights; None if products read the weights."""
    codes = OPERANDS[dtype].weights
    return e4m3_of(precision) if codes is E4M3 else codes


def operands_of(
    dev: Device, config: ModelConfig, options: StepOptions, scalars: Tensor | None
) -> Operands:
    """Return the object that makes the operands of products in a model's blocks, ready for a run.
    options: the step's options, with defaults filled in. scalars: the StepScalars of the device,
    I32 (16,)."""
    operands = OPERANDS[options.precision.matmul_dtype](dev)
    operands.prepare(config, options, scalars)
    return operands


def storage_of(dev: Device, dtype: DType) -> Storage:
    """Return the object that stores frozen matrices as codes of this dtype."""
    return next(kind for name, kind in STORAGE.items() if parse_dtype(name) == dtype)(dev)
