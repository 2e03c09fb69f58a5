"""Number formats, one class and one file each: bf16 and fp32, e4m3, int8, nf4, mxfp4.

How the products of a model's blocks compute: what they multiply, in which form activations and
gradients are made, made again and kept from forward to backward. How frozen matrices are kept,
encoded and decoded. Start with `format.py`.
"""

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, DType, parse_dtype
from llmq.base.tensor import Tensor
from llmq.formats.e4m3 import E4m3, e4m3_of
from llmq.formats.format import Format
from llmq.formats.int8 import Int8Format
from llmq.formats.mxfp4 import Mxfp4
from llmq.formats.nf4 import Nf4
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device

FORMATS: dict[str, type[Format]] = {
    "fp32": Format,
    "bf16": Format,
    "e4m3": E4m3,
    "int8": Int8Format,
    "nf4": Nf4,
    "mxfp4": Mxfp4,
}
"""By --matmul-dtype or --base-dtype."""


def codes_of(options: TrainConfig, dtype: str) -> DType | None:
    """The codes of weights that are trained and multiplied in this format; None: they have none."""
    codes = FORMATS[dtype].weights
    return e4m3_of(options) if codes is E4M3 else codes


def format_of(
    dev: Device, config: ModelConfig, options: TrainConfig, scalars: Tensor | None
) -> Format:
    """The format of the products of a model's blocks. options: normalized. scalars: StepScalars."""
    found = FORMATS[options.matmul_dtype](dev)
    found.prepare(config, options, scalars)
    return found


def format_in(dev: Device, dtype: DType) -> Format:
    """The format of frozen matrices that are kept in codes of this kind."""
    return next(kind for name, kind in FORMATS.items() if parse_dtype(name) == dtype)(dev)
