"""Model directories with ternary matrices in 2 bits, as transformers' BitNet layers (BitLinear)
read them.

    NAME.weight        U8 (out / 4, in)  rows r, r + out/4, r + out/2 and r + 3 out/4 share a byte,
                                         the first in the lowest bits, each code plus 1
    NAME.weight_scale  F32 (1,)          divisor of the codes: 1 / mean |w|

Only checkpoints of runs with --matmul-dtype ternary are exported so: other weights are far from
their codes.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from llmq.base.dtypes import F32, OPTION_DTYPES, U8, DType
from llmq.base.errors import LlmqError
from llmq.checkpoint.export_files import exported_files
from llmq.checkpoint.exports.format import ExportFormat, write_model
from llmq.checkpoint.exports.source import Source, saved_config
from llmq.checkpoint.hf import StoredAs
from llmq.checkpoint.safetensors_file import TensorSpec
from llmq.formats.ternary import rounded_keys
from llmq.ref.quantize.ternary import ternary_of
from llmq.state.params import Param

PACKED = 4  # codes in a byte


def rounded_matrices(source: Source, what: str) -> Collection[str]:
    """Keys of the matrices that the source's training rounded. what: for the error. LlmqError if
    it rounded none."""
    config = None if source.manifest is None else saved_config(source.manifest)
    if config is None or config.matmul_dtype != "ternary":
        raise LlmqError(f"{what}: only checkpoints of runs with --matmul-dtype ternary have codes")
    return rounded_keys(source.model, config.ternary_of)


def is_rounded(param: Param, keys: Collection[str]) -> bool:
    """Whether products round a parameter. keys: of rounded matrices."""
    return param.kind == "matrix" and param.block.startswith("layers.") and param.key in keys


def rounded(param: Param, values: np.ndarray) -> np.ndarray:
    """The values (rows, columns) that products multiply, F32: codes times each module's scale."""
    out = np.empty(values.shape, np.float32)
    for part in param.hf:
        codes, scale = ternary_of(values[part.start : part.stop])
        out[part.start : part.stop] = codes * (1 / (1 / scale))  # as readers compute
    return out


class BitnetCodes(StoredAs):
    """Layout with packed codes of rounded matrices, other tensors in dtype. keys: of rounded
    matrices. others: modules that stay as they are, submodules included."""

    def __init__(self, dtype: DType, keys: Collection[str], others: Iterable[str]):
        super().__init__(dtype)
        self._keys = keys
        self.fields = {
            "quantization_config": {
                "quant_method": "bitnet",
                "linear_class": "bitlinear",
                "quantization_mode": "offline",
                "modules_to_not_convert": ["lm_head", "score", *others],
            }
        }

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
        rounded_matrices(source, "--format bitnet")
        if source.model.arch.transposed:
            raise LlmqError(
                f"--format bitnet: transformers has no BitNet layers in {source.model.architecture}"
            )

    def occupied(self, out: Path) -> list[Path]:
        return exported_files(out)

    def write(self, source: Source, out: Path, dtype: str, *, verify: bool | None) -> list[str]:
        keys = rounded_matrices(source, "--format bitnet")
        params = (param for slab in source.table for param in slab.params)
        plain = [p for p in params if p.kind == "matrix" and not is_rounded(p, keys)]
        others = [part.name.removesuffix(".weight") for param in plain for part in param.hf]
        others += [] if source.began_as is None else map(re.escape, sorted(source.began_as.parts))
        stored = BitnetCodes(OPTION_DTYPES[dtype], keys, others)
        return write_model(source, out, stored, verify)
