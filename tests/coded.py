"""Model directories whose matrices are codes, made of those that are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from safetensors.torch import load_file, save_file

from tests.models import exported

MATRIX = "_proj.weight"
Change = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
NVFP4_SCHEME = QuantizationScheme(targets=["Linear"], **NVFP4A16)


def edited(name: str, folder: Path, config: dict, change: Change) -> Path:
    """A model directory with this quantization_config. change: tensors of a matrix by name, from
    its name and values."""
    folder.mkdir()
    content = json.loads((exported(name) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    tensors = load_file(exported(name) / "model.safetensors")
    for key in [key for key in tensors if key.endswith(MATRIX)]:
        tensors |= change(key, tensors.pop(key))
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors")
    return folder


def nvfp4(modelopt: bool, expected: dict[str, torch.Tensor]) -> tuple[dict, Change]:
    """A quantization_config, and codes whose scales do not follow from their values: the matrix
    needs a smaller factor, as if fused matrices shared one. expected gets values in F32."""

    def change(key: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        divisor = 0.7 * 448 * 6 / matrix.abs().max()
        largest = matrix.view(len(matrix), -1, 16).abs().amax(-1)
        scales = (1.2 * largest / 6 * divisor).to(torch.float8_e4m3fn)
        shared = {"args": NVFP4_SCHEME.weights, "dtype": torch.float32, "global_scale": divisor}
        levels = quantize(matrix, scales.float(), None, **shared)
        if modelopt:
            last = 1 / divisor
            expected[key] = levels * (scales.float() * last).repeat_interleave(16, 1)
        else:
            last = divisor.view(1)
            expected[key] = dequantize(levels, scales.float(), **shared)
        names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
        if modelopt:
            names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
        tensors = (pack_fp4_to_uint8(levels), scales, last, torch.ones(1))
        stem = key.removesuffix("weight")
        return {f"{stem}{n}": tensor for n, tensor in zip(names, tensors, strict=True)}

    if modelopt:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, change
    group = {"targets": ["Linear"], "weights": NVFP4_SCHEME.weights.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    return config | {"config_groups": {"group_0": group}}, change


def fp8_blocks(compressed: bool, expected: dict[str, torch.Tensor]) -> tuple[dict, Change]:
    """A quantization_config, and FP8 codes in blocks of 128 x 128, with larger scales than the
    blocks need. expected gets values in F32."""
    ending = "_scale" if compressed else "_scale_inv"

    def change(key: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = matrix.shape
        shape = -(-rows // 128), -(-columns // 128)
        scales = matrix.abs().max() / 448 * (1 + torch.arange(shape[0] * shape[1]).view(shape) / 8)
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        codes = (matrix / spread).to(torch.float8_e4m3fn)
        expected[key] = codes.float() * spread
        return {key: codes, f"{key}{ending}": scales}

    if not compressed:
        return {"quant_method": "fp8", "weight_block_size": [128, 128]}, change
    weights = {"strategy": "block", "block_structure": [128, 128]}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return config | {"config_groups": {"group_0": {"weights": weights}}}, change
