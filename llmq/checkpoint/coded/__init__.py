"""Files whose matrices are codes with scales, one kind of `quantization_config` a file.

`decoded` puts what reads as the matrices' values in the place of codes; CODED is the table of what
does it. Start with `matrix.py`. The kinds that a config.json may name are in `arch/common.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmq.arch.common import QUANTIZATIONS
from llmq.base.errors import LlmqError
from llmq.checkpoint.coded.bitsandbytes import decode_bitsandbytes
from llmq.checkpoint.coded.fp8 import decode_compressed_tensors, decode_fp8
from llmq.checkpoint.coded.matrix import Stored
from llmq.checkpoint.coded.mxfp4 import decode_mxfp4

Tensors = dict[str, Any]
"""By name: Stored, or a matrix that is decoded."""

_DECODE = (decode_bitsandbytes, decode_compressed_tensors, decode_fp8, decode_mxfp4)
CODED: dict[str, Callable[[Tensors, Mapping[str, Any]], None]] = dict(
    zip(QUANTIZATIONS, _DECODE, strict=True)
)
"""By quant_method: takes codes and scales out of a file's tensors, and puts matrices there."""


def decoded(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> Tensors:
    """The tensors of a file with this quantization_config. LlmqError where it has codes of a kind
    that cannot be read."""
    tensors: Tensors = dict(stored)
    try:
        CODED[config["quant_method"]](tensors, config)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise LlmqError(f"config.json: quantization_config cannot be read ({error!r})") from error
    return tensors
