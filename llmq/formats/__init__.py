"""Number formats, one file each: bf16 and fp32, e4m3, int8, nf4, mxfp4.

`Operands` (`operands.py`) are what the products of a model's blocks multiply: in which form
activations and gradients are made, made again and kept from forward to backward. `Storage`
(`storage.py`) is how frozen matrices are kept, encoded and decoded.
"""

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, DType, parse_dtype
from llmq.base.tensor import Tensor
from llmq.formats.e4m3 import E4m3Operands, E4m3Storage, e4m3_of
from llmq.formats.int8 import Int8Operands, Int8Storage
from llmq.formats.mxfp4 import Mxfp4Storage
from llmq.formats.nf4 import Nf4Storage
from llmq.formats.operands import Operands
from llmq.formats.storage import Storage
from llmq.options.groups.precision import PrecisionOptions
from llmq.options.options import StepOptions
from llmq.runtime.device import Device

OPERANDS: dict[str, type[Operands]] = {
    "fp32": Operands,
    "bf16": Operands,
    "e4m3": E4m3Operands,
    "int8": Int8Operands,
}
"""By --matmul-dtype."""

STORAGE: dict[str, type[Storage]] = {
    "e4m3": E4m3Storage,
    "int8": Int8Storage,
    "nf4": Nf4Storage,
    "mxfp4": Mxfp4Storage,
}
"""By --base-dtype."""


def codes_of(precision: PrecisionOptions, dtype: str) -> DType | None:
    """The codes of weights that are trained and multiplied in this format; None: they have none."""
    codes = OPERANDS[dtype].weights
    return e4m3_of(precision) if codes is E4M3 else codes


def operands_of(
    dev: Device, config: ModelConfig, options: StepOptions, scalars: Tensor | None
) -> Operands:
    """The operands of the products of a model's blocks. options: normalized. scalars: StepScalars,
    I32 (16,)."""
    found = OPERANDS[options.precision.matmul_dtype](dev)
    found.prepare(config, options, scalars)
    return found


def storage_of(dev: Device, dtype: DType) -> Storage:
    """The storage of frozen matrices that are kept in codes of this kind."""
    return next(kind for name, kind in STORAGE.items() if parse_dtype(name) == dtype)(dev)
