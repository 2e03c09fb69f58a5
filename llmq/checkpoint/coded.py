"""Quantized model files, which store matrices as codes with scales in a format that
`quantization_config` names. `decoded` replaces codes and scales by matrices that read as F32 or
BF16 values. CODED is the table of supported methods (names: `arch/common.py`)."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.common import QUANTIZATIONS
from llmq.base.dtypes import E4M3_BLOCKS, MXFP4, NF4, NVFP4
from llmq.base.errors import LlmqError
from llmq.base.files import json_object
from llmq.checkpoint.export_files import MODELOPT_FILE
from llmq.checkpoint.safetensors_file import NUMPY_DTYPES, PIECE, FileTensor
from llmq.ref.common import row_blocks
from llmq.ref.quantize import nvfp4
from llmq.ref.quantize.four_bits import MXFP4_BLOCK as BLOCK
from llmq.ref.quantize.four_bits import mxfp4_decode
from llmq.ref.quantize.fp8_blocks import BLOCK as FP8_BLOCK


class CodedMatrix:
    """A quantized matrix that reads like a FileTensor, as F32 values.

    path: file of the codes. decode(start, stop): function that returns the values of rows [start,
    stop). kept_by: the --base-dtype that can keep these codes in training; None: none can. stored:
    the tensors that `codes` returns, by name; arrays are not divided by rows.
    """

    dtype = "F32"

    def __init__(
        self,
        codes: FileTensor,
        shape: tuple[int, ...],
        decode: Callable[[int, int], np.ndarray],
        kept_by: str | None = None,
        stored: Mapping[str, FileTensor | np.ndarray] | None = None,
    ):
        self.path, self.shape, self._decode = codes.path, shape, decode
        self.kept_by, self._stored = kept_by, stored

    def codes(self, ranges: list[tuple[int, int]]) -> dict[str, Iterator[np.ndarray]] | None:
        """Return the stored codes and scales in pieces, by the names that the storage `kept_by`
        uses; None if this storage must encode the values instead. ranges: ranges of rows, in the
        order wanted; E4M3 blocks of rows cannot be reordered."""
        if self._stored is None or (self.kept_by == E4M3_BLOCKS.name and len(ranges) > 1):
            return None
        return {name: _pieces(tensor, ranges) for name, tensor in self._stored.items()}

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        for rows in row_blocks(self.shape[0], prod(self.shape[1:]), PIECE):
            yield rows, self.rows(rows.start, rows.stop)

    def byte_pieces(self) -> Iterator[np.ndarray]:
        """The bytes of the decoded values, uint8, a few rows at a time."""
        for _, values in self.pieces():
            yield np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def rows(self, start: int, stop: int, *, transposed: bool = False) -> np.ndarray:
        if transposed:
            return self._decode(0, self.shape[0])[:, start:stop].T
        return self._decode(start, stop)


def _pieces(tensor: FileTensor | np.ndarray, ranges: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    if isinstance(tensor, np.ndarray):
        yield tensor
        return
    width = prod(tensor.shape[1:])
    for first, last in ranges:
        for rows in row_blocks(last - first, width, PIECE):
            yield tensor.flat((first + rows.start) * width, (first + rows.stop) * width)


def scaled(codes: FileTensor, scales: FileTensor, block: tuple[int, int] | None) -> CodedMatrix:
    """Return a matrix (out, in) whose codes are numbers, with one scale per block. block: rows and
    columns of a block; blocks at the right and lower edge may be smaller. None: one scale per row
    if there are as many scales as rows, else one for the matrix."""
    out, columns = codes.shape
    factors = scales.flat().astype(np.float32)
    if block is None:
        block = (1, columns) if factors.size == out and scales.shape != (1,) else (out, columns)
    factors = factors.reshape(-(-out // block[0]), -(-columns // block[1]))

    def decode(start: int, stop: int) -> np.ndarray:
        values = codes.flat(start * columns, stop * columns).astype(np.float32)
        of_rows = factors[np.arange(start, stop) // block[0]]
        return values.reshape(-1, columns) * of_rows[:, np.arange(columns) // block[1]]

    if block != (FP8_BLOCK, FP8_BLOCK) or codes.dtype not in FP8:
        return CodedMatrix(codes, codes.shape, decode)
    stored = {"codes": codes, "scales": factors}
    return CodedMatrix(codes, codes.shape, decode, E4M3_BLOCKS.name, stored)


def drop(tensors: dict[str, Any], *endings: str) -> None:
    """Remove tensors with these endings of names, such as scales of activations, which only FP8
    products need."""
    for name in [name for name in tensors if name.endswith(endings)]:
        del tensors[name]


_CODES, _SCALES = "_blocks", "_scales"


# ------------------------------------------------------------------------------------------------
# MXFP4 files of gpt-oss: experts as 4-bit codes, with one power of two for each 32 codes.
#
# NAME_blocks   U8 (experts, out, in / 32, 16), two codes a byte, the first in the lower bits
# NAME_scales   U8 (experts, out, in / 32), exponents with a bias of 127
#
# NAME is a parameter (experts, in, out); the rows of codes are the parameter's columns.


def decode_mxfp4(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    for stored in [name for name in tensors if name.endswith(_CODES)]:
        name, codes = stored.removesuffix(_CODES), tensors.pop(stored)
        scales = tensors.pop(name + _SCALES, None)
        if scales is None or codes.shape != (*scales.shape, BLOCK // 2) or len(codes.shape) != 4:
            raise LlmqError(f"'{codes.path}': {stored} has no {name + _SCALES} of its shape")
        tensors[name] = _Experts(codes, scales)


class _Experts(CodedMatrix):
    """The MXFP4 codes of all experts of a layer. BF16 represents all values exactly."""

    dtype = "BF16"

    def __init__(self, codes: FileTensor, scales: FileTensor):
        count, self._height, blocks, _ = codes.shape
        columns = blocks * BLOCK

        def decode(start: int, stop: int) -> np.ndarray:
            pairs, exponents = (
                x.flat(start * blocks * each, stop * blocks * each)
                for x, each in ((codes, BLOCK // 2), (scales, 1))
            )
            out = np.empty((stop - start, columns), np.float32)
            mxfp4_decode(out, pairs, exponents, out.size)
            return out

        super().__init__(codes, (count, columns, self._height), decode, MXFP4.name)

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        for first in range(self.shape[0]):
            rows = self.rows(first * self._height, (first + 1) * self._height)
            yield slice(first, first + 1), rows.T[None]

    def rows(self, start: int, stop: int, *, transposed: bool = True) -> np.ndarray:
        """Return rows [start, stop), where the rows of all experts count in sequence, as in
        `FileTensor.rows`."""
        return self._decode(start, stop)


FP8, SCALES = ("F8_E4M3",), ("_scale_inv", "_scale")


# ------------------------------------------------------------------------------------------------
# FP8 and INT8 files: codes with one scale per tensor, row, group of columns, or block.
#
# DeepSeek and transformers write
#
#     NAME.weight                                F8_E4M3 (out, in)
#     NAME.weight_scale_inv or NAME.weight_scale factors: value = code * factor
#
# and compressed-tensors (llm-compressor, vLLM)
#
#     NAME.weight        F8_E4M3 or I8 (out, in)
#     NAME.weight_scale  one for the tensor, per row (out, 1), per group of columns, or per block


def decode_fp8(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    block = config.get("weight_block_size")
    put_scaled(tensors, FP8, None if block is None else _sizes("weight_block_size", block))
    drop(tensors, ".input_scale", ".activation_scale")


def put_scaled(
    tensors: dict[str, Any], dtypes: tuple[str, ...], block: tuple[int, int] | None
) -> None:
    """Replace every tensor of these dtypes by a CodedMatrix, and remove its scales. block: see
    `scaled`. LlmqError if a tensor has no scales or the wrong number of scales."""
    for name in [name for name, tensor in tensors.items() if tensor.dtype in dtypes]:
        codes = tensors[name]
        scales = [f"{name}{end}" for end in SCALES if f"{name}{end}" in tensors]
        if len(codes.shape) != 2 or not scales:
            raise LlmqError(f"'{codes.path}': {name} is {codes.dtype} without scales")
        try:
            tensors[name] = scaled(codes, tensors.pop(scales[0]), block)
        except ValueError as error:
            raise LlmqError(
                f"'{codes.path}': {scales[0]} has not as many scales as {name} {list(codes.shape)} "
                "has parts"
            ) from error


_PACKED = "nvfp4-pack-quantized"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _PACKED)


def decode_compressed_tensors(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    kind = config.get("format")
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if kind == "mixed-precision":
        kinds = [group.get("format") for group in config["config_groups"].values()]
    else:
        kinds = [kind]
    if unknown := [kind for kind in kinds if kind not in _FORMATS or sparse != "dense"]:
        raise LlmqError(
            f"quantization_config: the format {unknown[0]!r} of compressed-tensors cannot be read, "
            f"only {', '.join(_FORMATS)}"
        )
    if (config.get("transform_config") or {}).get("config_groups"):
        raise LlmqError("quantization_config: weights that a transform_config turns cannot be read")
    put_nvfp4(tensors, "weight_packed", "weight_global_scale", np.reciprocal)
    groups = config["config_groups"].values()
    others = [group for group in groups if (group.get("format") or kind) != _PACKED]
    blocks = {_block(group.get("weights") or {}) for group in others}
    if len(blocks) > 1:
        raise LlmqError("quantization_config: groups with different scales cannot be read")
    put_scaled(tensors, (*FP8, "I8"), blocks.pop() if blocks else None)
    ends = "input_scale", "output_scale", "k_scale", "v_scale", "input_global_scale"
    drop(tensors, *(f".{end}" for end in ends))


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share one scale: the argument `block` of `scaled`."""
    if not weights.get("symmetric", True):
        raise LlmqError("quantization_config: codes with zero points cannot be read")
    if weights.get("strategy") == "block":
        return _sizes("block_structure", weights["block_structure"])
    if weights.get("strategy") == "group":
        return _sizes("group_size", [1, weights["group_size"]])
    return None


def _sizes(name: str, values: Any) -> tuple[int, int]:
    """Return rows and columns of a block; LlmqError unless both are positive whole numbers. name:
    the field, for the message."""
    rows, columns = values
    for size in (rows, columns):
        if type(size) is not int or size <= 0:
            raise LlmqError(f"quantization_config: {name}: sizes must be positive, got {size!r}")
    return rows, columns


# ------------------------------------------------------------------------------------------------
# NVFP4 files of compressed-tensors and modelopt: 4-bit codes, an E4M3 scale for 16 codes of a row,
# one F32 number for the matrix.
#
# NAME.weight_packed or NAME.weight                 U8 (out, in / 2), the first in the lower bits
# NAME.weight_scale                                 F8_E4M3 (out, in / 16)
# NAME.weight_global_scale or NAME.weight_scale_2   F32 (1,), a divisor or a factor
#
# value = level * (scale * factor)


def put_nvfp4(
    tensors: dict[str, Any], codes: str, last: str, factor: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Replace NVFP4 codes by CodedMatrix, and remove their scales. codes, last: the last components
    of the names of the codes and of the matrix's number. factor: function that returns the factor
    for this number."""
    for end in [name for name in tensors if name.endswith(f".{last}")]:
        stem = end.removesuffix(last)
        number = tensors.pop(end)
        packed, scales = (tensors.pop(f"{stem}{n}", None) for n in (codes, "weight_scale"))
        try:
            rows, half = packed.shape
            found = (packed.dtype, scales.dtype, scales.shape, prod(number.shape))
            if found != ("U8", *FP8, (rows, 2 * half // nvfp4.BLOCK), 1) or half % 8:
                raise ValueError(found)
        except (AttributeError, ValueError) as error:
            raise LlmqError(
                f"'{number.path}': {stem}{codes} has not the codes and scales of {end}"
            ) from error
        with np.errstate(divide="ignore"):
            factors = factor(number.flat().reshape(1).astype(np.float32))
        tensors[f"{stem}weight"] = _nvfp4(packed, scales, factors)


def _nvfp4(packed: FileTensor, scales: FileTensor, factors: np.ndarray) -> CodedMatrix:
    rows, half = packed.shape

    def decode(start: int, stop: int) -> np.ndarray:
        out, width = np.empty((stop - start, 2 * half), np.float32), 2 * half // nvfp4.BLOCK
        own = scales.flat(start * width, stop * width)
        nvfp4.nvfp4_decode(out, packed.flat(start * half, stop * half), own, factors, out.size)
        return out

    stored = {"codes": packed, "scales": scales, "factors": factors}
    return CodedMatrix(packed, (rows, 2 * half), decode, NVFP4.name, stored)


_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")


def decode_modelopt(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    algorithm = config.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise LlmqError(
            f"quantization_config: the quant_algo {algorithm!r} of modelopt cannot be read, only "
            f"{', '.join(_ALGORITHMS)}"
        )
    put_nvfp4(tensors, "weight", "weight_scale_2", np.copy)
    put_scaled(tensors, FP8, None)
    drop(tensors, ".input_scale", ".k_scale", ".v_scale")


_STATE = ".quant_state.bitsandbytes__"


# ------------------------------------------------------------------------------------------------
# bitsandbytes files: NF4 codes with scales, which may be quantized too (nested).
#
# NAME                                      U8, two codes a byte, the first in the higher bits
# NAME.absmax                               F32, one scale for 64 codes; nested: U8 codes of scales
# NAME.quant_map                            F32 (16,), the value of each code
# NAME.nested_absmax, NAME.nested_quant_map F32, one factor for 256 scales; value of each scale code
# NAME.quant_state.bitsandbytes__nf4        JSON: shape, sizes of blocks, nested_offset


def decode_bitsandbytes(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    if config.get("load_in_8bit"):
        raise LlmqError("quantization_config: 8 bits of bitsandbytes cannot be read, only nf4")
    states = {name.partition(_STATE)[0]: name for name in tensors if _STATE in name}
    for name, state in states.items():
        kind = state.partition(_STATE)[2]
        if kind != "nf4":
            raise LlmqError(f"'{tensors[state].path}': {name} is {kind}, which cannot be read")
        tensors[name] = _matrix(name, tensors, tensors[state])
    parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    drop(tensors, *(f"{name}.{part}" for name in states for part in parts), f"{_STATE}nf4")


def _matrix(name: str, tensors: Mapping[str, FileTensor], state: FileTensor) -> CodedMatrix:
    """Return the NF4 matrix of this name. state: tensor with the JSON. LlmqError if sizes of codes
    and scales do not agree."""
    codes = tensors[name]
    try:
        fields = json.loads(state.flat().tobytes())
        shape, block = tuple(map(int, fields["shape"])), int(fields["blocksize"])
        nested = int(fields.get("nested_blocksize", 1))
        if min(block, nested) < 1:
            raise ValueError(f"blocks of {block} and {nested}")
        scales = tensors[f"{name}.absmax"].flat()
        if "nested_blocksize" in fields:
            levels = tensors[f"{name}.nested_quant_map"].flat()
            groups = tensors[f"{name}.nested_absmax"].flat()
            of_scale = np.arange(scales.size) // nested
            offset = np.float32(fields["nested_offset"])
            scales = levels[scales] * groups[of_scale] + offset
        levels = tensors[f"{name}.quant_map"].flat().astype(np.float32)
        size = NUMPY_DTYPES[codes.dtype].itemsize
        whole = (scales.size * block, 2 * prod(codes.shape) * size, levels.size)
        expected = (-(-prod(shape) // block) * block, prod(shape), 16)
        if whole != expected or block % (2 * size):
            raise ValueError(f"sizes {shape}, {codes.shape}, {scales.shape}, {levels.shape}")
    except (ValueError, KeyError, TypeError, IndexError, ArithmeticError) as error:
        raise LlmqError(f"'{codes.path}': the codes of {name} are damaged ({error!r})") from error

    def decode(start: int, stop: int) -> np.ndarray:
        columns = prod(shape[1:])
        first, last = start * columns // block, -(-stop * columns // block)
        end = min(last * block // 2 // size, prod(codes.shape))
        pairs = codes.flat(first * block // 2 // size, end).view(np.uint8)
        values = np.stack([levels[pairs >> 4], levels[pairs & 15]], axis=-1).reshape(-1)
        values *= np.repeat(scales[first:last], block)[: values.size]
        skipped = start * columns - first * block
        return values[skipped : skipped + (stop - start) * columns].reshape(-1, *shape[1:])

    return CodedMatrix(codes, shape, decode, NF4.name)


# ------------------------------------------------------------------------------------------------
# BitNet's files (transformers): ternary codes plus 1, in 2 bits each, with one scale for the
# matrix.
#
# NAME.weight        U8 (out / 4, in), of rows r, r + out/4, ..., the first in the lowest bits
# NAME.weight_scale  one number: value = code / number; with linear_class autobitlinear, times


def decode_bitnet(tensors: dict[str, Any], config: Mapping[str, Any]) -> None:
    for name in [name for name, tensor in tensors.items() if tensor.dtype == "U8"]:
        scale = tensors.pop(f"{name}_scale").flat().astype(np.float32)
        if scale.shape != (1,) or len(tensors[name].shape) != 2:
            raise LlmqError(f"'{tensors[name].path}': {name} has not one scale")
        factor = scale[0] if config.get("linear_class") == "autobitlinear" else 1 / scale[0]
        tensors[name] = _bitnet(tensors[name], factor)


def _bitnet(packed: FileTensor, factor: np.float32) -> CodedMatrix:
    quarter, columns = packed.shape

    def decode(start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, columns), np.float32)
        for place in range(4):
            first = place * quarter
            low, high = max(start, first), min(stop, first + quarter)
            if low < high:
                part = packed.flat((low - first) * columns, (high - first) * columns)
                codes = (part >> 2 * place & 3).astype(np.int8) - 1
                out[low - start : high - start] = codes.reshape(-1, columns) * factor
        return out

    return CodedMatrix(packed, (4 * quarter, columns), decode)


Tensors = dict[str, Any]
"""The tensors of a file by name; each is a FileTensor or a CodedMatrix."""

_DECODE = (
    decode_bitnet,
    decode_bitsandbytes,
    decode_compressed_tensors,
    decode_fp8,
    decode_modelopt,
    decode_mxfp4,
)
CODED: dict[str, Callable[[Tensors, Mapping[str, Any]], None]] = dict(
    zip(QUANTIZATIONS, _DECODE, strict=True)
)
"""For each quant_method, the function that replaces codes and scales in a file's tensors by
matrices."""


def quantization_of(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of a model; None if the model is not quantized. Older models
    of modelopt have it in a separate file."""
    own = directory / MODELOPT_FILE
    if "quantization_config" in config or not own.is_file():
        return config.get("quantization_config")
    return {"quant_method": "modelopt", **json_object(own).get("quantization", {})}


def decoded(stored: Mapping[str, FileTensor], config: Mapping[str, Any]) -> Tensors:
    """Return a file's tensors, with one CodedMatrix in the place of each matrix's codes and scales.
    config: quantization_config of config.json. LlmqError for codes that cannot be read."""
    tensors: Tensors = dict(stored)
    try:
        CODED[config["quant_method"]](tensors, config)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise LlmqError(f"config.json: quantization_config cannot be read ({error!r})") from error
    return tensors
