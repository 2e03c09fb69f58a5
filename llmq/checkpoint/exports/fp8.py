"""Model directories with FP8 matrices in the format of compressed-tensors, for vLLM, and for
transformers with the package compressed-tensors.

A matrix has either one scale, as in e4m3 training, whose codes then are the same, or one scale per
row. Matrices that llmq fuses (q, k and v) share a scale. Scales of activations are computed at run
time (dynamic), or are the delayed scales of the training (static).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmq.base.dtypes import E4M3, E4M3_MAX, F32, OPTION_DTYPES, DType
from llmq.base.errors import ConfigError, LlmqError
from llmq.checkpoint.export_files import exported_files
from llmq.checkpoint.exports.bitnet import multiplied
from llmq.checkpoint.exports.format import ExportFormat, write_model
from llmq.checkpoint.exports.source import Source, saved_config
from llmq.checkpoint.hf import StoredAs
from llmq.checkpoint.safetensors_file import TensorSpec
from llmq.formats.operands import id_of
from llmq.formats.scales import SCALE_MARGIN, STATE
from llmq.ref.common import encode_fp8, row_blocks
from llmq.ref.quantize.quantize import LEAST_ABS_MAX
from llmq.state.params import Param

SCALES, ACTIVATIONS = ("tensor", "row"), ("dynamic", "static")
_STRATEGY = {"tensor": "tensor", "row": "channel"}
"""Value of `strategy` in compressed-tensors, by value of --scales."""


class Fp8Codes(StoredAs):
    """Layout with E4M3 codes and F32 scales for the matrices of all layers, and dtype for other
    tensors.

    scales: one scale per "tensor" or per "row". inputs: the scale of each matrix's input, by block
    and key of the matrix; None: dynamic scales. others: names of modules that stay unquantized,
    submodules included.
    """

    def __init__(
        self,
        dtype: DType,
        scales: str,
        inputs: Mapping[tuple[str, str], float] | None,
        others: Iterable[str] = (),
    ):
        super().__init__(dtype)
        self._by_row, self._inputs = scales == "row", inputs
        strategy, dynamic = _STRATEGY[scales], inputs is None
        codes = {"num_bits": 8, "type": "float", "symmetric": True}
        of_inputs = {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
        group = {
            "targets": ["Linear"],
            "weights": codes | {"strategy": strategy, "dynamic": False},
            "input_activations": codes | of_inputs,
            "output_activations": None,
        }
        self.fields = {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": group},
                "ignore": ["lm_head", "score", *(rf"re:(.*\.)?{re.escape(n)}\..*" for n in others)],
                "kv_cache_scheme": None,
            }
        }

    @staticmethod
    def _is_coded(param: Param) -> bool:
        return param.kind == "matrix" and param.block.startswith("layers.")

    def specs(self, param: Param) -> list[TensorSpec]:
        if not self._is_coded(param):
            return super().specs(param)
        specs = []
        for weight in super().specs(param):
            scales = (weight.shape[0], 1) if self._by_row else (1,)
            specs.append(TensorSpec(weight.name, E4M3, weight.shape))
            specs.append(TensorSpec(f"{weight.name}_scale", F32, scales))
            if self._inputs is not None:
                module = weight.name.removesuffix(".weight")
                specs.append(TensorSpec(f"{module}.input_scale", F32, (1,)))
        return specs

    def arrays(self, param: Param, values: np.ndarray) -> Iterator[np.ndarray]:
        if not self._is_coded(param):
            yield from super().arrays(param, values)
            return
        codes, scales = coded(values, by_row=self._by_row)
        for part in param.hf:
            rows = slice(part.start, part.stop)
            yield part.stored(codes[rows])
            yield part.stored(scales[rows, None]) if self._by_row else scales[:1]
            if self._inputs is not None:
                yield np.array([self._inputs[param.block, param.key]], np.float32)

    def values(self, param: Param, values: np.ndarray) -> np.ndarray:
        if not self._is_coded(param):
            return super().values(param, values)
        codes, scales = coded(values, by_row=self._by_row)
        return codes.astype(np.float32) * scales[:, None]


def coded(values: np.ndarray, *, by_row: bool) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a matrix (rows, columns) as e4m3 training does. Return E4M3 codes (rows, columns)
    and F32 scales (rows,), which are all equal unless by_row is True."""
    codes, largest = np.empty(values.shape, np.uint8), np.empty(len(values), np.float32)
    blocks = list(row_blocks(*values.shape))
    for rows in blocks:
        largest[rows] = np.abs(values[rows].astype(np.float32)).max(1)
    largest = largest if by_row else np.full_like(largest, largest.max())
    scales = np.maximum(largest, LEAST_ABS_MAX) / np.float32(E4M3_MAX)
    factors = np.float32(1) / scales[:, None]
    for rows in blocks:
        encode_fp8(codes[rows], values[rows], factors[rows], E4M3.numpy)
    return codes.view(E4M3.numpy), scales


class Fp8(ExportFormat):
    """FP8 matrices with scales (--format fp8).

    scales: "tensor" or "row"; None: "tensor" for checkpoints of fp8 training, else "row".
    activations: "dynamic" or "static"; None: "dynamic".
    """

    name, dtypes = "fp8", ("fp32", "bf16")

    def __init__(self, scales: str | None = None, activations: str | None = None):
        for name, value, known in (
            ("scales", scales, SCALES),
            ("activations", activations, ACTIVATIONS),
        ):
            if value not in (None, *known):
                raise ConfigError(f"--{name}: expected {' or '.join(known)}, got {value!r}")
        self.scales, self.activations = scales, activations

    def check(self, source: Source, dtype: str) -> None:
        model = source.model
        if source.adapters is not None:
            raise LlmqError("--format fp8: adapters are no matrices to be coded: add --merge")
        if model.arch.transposed:
            raise LlmqError(
                f"--format fp8: compressed-tensors has no codes for the layers of "
                f"{model.architecture}"
            )
        if any(len(m.shape) != 2 for layer in model.layer_kinds for m in model.matrices(layer)):
            raise LlmqError(f"--format fp8: experts of {model.architecture} are not written yet")
        if self.activations == "static":
            _input_scales(source)

    def occupied(self, out: Path) -> list[Path]:
        return exported_files(out)

    def write(self, source: Source, out: Path, dtype: str, *, verify: bool | None) -> list[str]:
        trained = source.manifest is not None and saved_config(source.manifest).is_fp8
        scales = self.scales or ("tensor" if trained else "row")
        inputs = _input_scales(source) if self.activations == "static" else None
        others = [] if source.began_as is None else sorted(source.began_as.parts)
        codes = Fp8Codes(OPTION_DTYPES[dtype], scales, inputs, others)
        source = replace(source, read=multiplied(source))
        return write_model(source, out, codes, verify)


def _input_scales(source: Source) -> dict[tuple[str, str], float]:
    """Return the delayed scale of each matrix's input, by block and key of the matrix. LlmqError if
    the source is no checkpoint with delayed scales."""
    state = {} if source.manifest is None else source.manifest.state
    scales = {}
    for layer in range(source.model.num_layers):
        for matrix in source.model.matrices(layer):
            history = state.get(f"{STATE}{id_of(layer, matrix.input)}")
            if not history:
                raise LlmqError(
                    "--activations static: only checkpoints of runs with --matmul-dtype e4m3 "
                    "--fp8-recipe delayed have scales of activations"
                )
            scales[f"layers.{layer}", matrix.key] = max(history) * SCALE_MARGIN / E4M3_MAX
    return scales
