"""Model directories with ternary matrices in 2 bits, as transformers' BitNet layers (BitLinear)
read them.

    NAME.weight        U8 (out / 4, in)  rows r, r + out/4, r + out/2 and r + 3 out/4 share a byte,
                                         the first in the lowest bits, each code plus 1
    NAME.weight_scale  F32 (1,)          divisor of the codes: 1 / mean |w|

Only checkpoints of runs with --matmul-dtype ternary can have this format: other weights are far
from their codes.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.dtypes import F32, OPTION_DTYPES, U8, DType
from llmq.base.errors import LlmqError
from llmq.base.files import json_object
from llmq.checkpoint.bitnet import ONLINE, bitnet_fields, is_rounded, rounded
from llmq.checkpoint.export_files import CONFIG_FILE, exported_files
from llmq.checkpoint.exports.format import ExportFormat, write_model
from llmq.checkpoint.exports.source import Source, saved_config
from llmq.checkpoint.hf import StoredAs
from llmq.checkpoint.safetensors_file import TensorSpec
from llmq.formats.ternary import rounded_keys
from llmq.options.options import TrainConfig
from llmq.ref.quantize.ternary import ternary_of
from llmq.state.params import Param

PACKED = 4  # number of codes in a byte


def ternary_run(source: Source, what: str) -> TrainConfig:
    """Return the options of the source's run. what: the option that needs codes, for the error.
    LlmqError unless the run was ternary training."""
    config = None if source.manifest is None else saved_config(source.manifest)
    if config is None or config.matmul_dtype != "ternary":
        raise LlmqError(f"{what}: only checkpoints of runs with --matmul-dtype ternary have codes")
    return config


def multiplied(source: Source) -> Callable[[Param], np.ndarray]:
    """Return a function that reads the values that products multiply: rounded values, F32, of
    parameters that training rounded; the source's values of all others."""
    if source.manifest is not None:
        config = saved_config(source.manifest)
        how = bitnet_fields(source.model, config.ternary_of, quantization_mode=ONLINE)
        how = how["quantization_config"] if config.matmul_dtype == "ternary" else {}
    else:
        is_coded = source.coded == "bitnet" and source.exact
        how = json_object(source.folder / CONFIG_FILE)["quantization_config"] if is_coded else {}
    if how.get("quantization_mode") != ONLINE:
        return source.read
    kept = how.get("modules_to_not_convert") or []

    def read(param: Param) -> np.ndarray:
        values, of_block = source.read(param), param.block.startswith("layers.")
        module = param.hf[0].name.removesuffix(".weight")
        if param.kind != "matrix" or not of_block or module in kept:
            return values
        return rounded(param, param.by_row(values)).reshape(values.shape)

    return read


class BitnetCodes(StoredAs):
    """Layout with packed codes for rounded matrices, and dtype for other tensors. keys: keys of
    rounded matrices. fields: fields of config.json."""

    def __init__(self, dtype: DType, keys: Collection[str], fields: Mapping[str, Any]):
        super().__init__(dtype)
        self._keys, self.fields = keys, fields

    def specs(self, param: Param) -> list[TensorSpec]:
        if not is_rounded(param, self._keys):
            return super().specs(param)
        specs = []
        for weight in super().specs(param):
            rows, columns = weight.shape
            specs.append(TensorSpec(weight.name, U8, (rows // PACKED, columns)))
            specs.append(TensorSpec(f"{weight.name}_scale", F32, (1,)))
        return specs

    def arrays(self, param: Param, values: np.ndarray) -> Iterator[np.ndarray]:
        if not is_rounded(param, self._keys):
            yield from super().arrays(param, values)
            return
        for part in param.hf:
            codes, scale = ternary_of(part.stored(param.by_row(values)[part.start : part.stop]))
            quarters = (codes + 1).astype(np.uint8).reshape(PACKED, -1, codes.shape[1])
            packed = np.zeros_like(quarters[0])
            for place, quarter in enumerate(quarters):
                packed |= quarter << 2 * place
            yield packed
            yield np.array([1 / scale], np.float32)

    def values(self, param: Param, values: np.ndarray) -> np.ndarray:
        if not is_rounded(param, self._keys):
            return super().values(param, values)
        return rounded(param, values)


class Bitnet(ExportFormat):
    """Ternary matrices in 2 bits (--format bitnet)."""

    name, dtypes = "bitnet", ("fp32", "bf16")

    def check(self, source: Source, dtype: str) -> None:
        ternary_run(source, "--format bitnet")
        if source.model.arch.transposed:
            raise LlmqError(
                f"--format bitnet: transformers has no BitNet layers in {source.model.architecture}"
            )

    def occupied(self, out: Path) -> list[Path]:
        return exported_files(out)

    def write(self, source: Source, out: Path, dtype: str, *, verify: bool | None) -> list[str]:
        config, model = ternary_run(source, "--format bitnet"), source.model
        others = [] if source.began_as is None else map(re.escape, sorted(source.began_as.parts))
        how = {"linear_class": "bitlinear", "quantization_mode": "offline"}
        fields = bitnet_fields(model, config.ternary_of, others, **how)
        keys = rounded_keys(model, config.ternary_of)
        return write_model(source, out, BitnetCodes(OPTION_DTYPES[dtype], keys, fields), verify)
