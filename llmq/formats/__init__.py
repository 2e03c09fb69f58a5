"""Number formats, one class and one file each: bf16 and fp32, e4m3, int8.

How the products of a model's blocks compute: what they multiply, in which form activations and
gradients are made, made again and kept from forward to backward.
"""

from __future__ import annotations

from llmq.arch.model_config import ModelConfig
from llmq.base.tensor import Tensor
from llmq.formats.e4m3 import E4m3
from llmq.formats.format import Format
from llmq.formats.int8 import Int8Format
from llmq.options.options import TrainConfig
from llmq.runtime.device import Device

FORMATS: dict[str, type[Format]] = {
    "fp32": Format,
    "bf16": Format,
    "e4m3": E4m3,
    "int8": Int8Format,
}
"""By --matmul-dtype."""


def format_of(
    dev: Device, config: ModelConfig, options: TrainConfig, scalars: Tensor | None
) -> Format:
    """The format of the products of a model's blocks. options: normalized. scalars: StepScalars."""
    return FORMATS[options.matmul_dtype].of_model(dev, config, options, scalars)
