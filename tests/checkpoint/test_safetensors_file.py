"""The safetensors format against the library that defines it, and every damage to a header."""

from __future__ import annotations

import io
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, I32
from llmq.base.errors import LlmqError
from llmq.checkpoint import safetensors_file
from llmq.checkpoint.safetensors_file import (
    SafetensorsFile,
    TensorSpec,
    open_foreign,
    write_safetensors,
)

TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
}


def save(path, arrays, metadata=None):
    dtypes = {d.numpy: d for d in (F32, BF16, E4M3, E5M2, I32)}
    specs = [TensorSpec(name, dtypes[a.dtype], a.shape) for name, a in arrays.items()]
    with open(path, "wb") as file:
        write_safetensors(file, specs, iter(arrays.values()), metadata or {})


@pytest.mark.parametrize("label", TORCH)
def test_reads_what_the_library_writes(tmp_path, label):
    tensor = torch.arange(15).reshape(3, 5).to(TORCH[label])
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"x": tensor, "empty": tensor[:0]}, path, {"key": "value"})
    file = open_foreign(path)
    assert file.metadata == {"key": "value"}
    assert file.tensors["x"].dtype == label
    assert file.tensors["x"].shape == (3, 5)
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    np.testing.assert_array_equal(file.read("x").view(np.uint8), raw)
    assert file.read("x", 4, 9).astype(np.float32).tolist() == [4, 5, 6, 7, 8]
    assert file.read("empty").shape == (0,)


def test_the_library_reads_what_we_write(tmp_path, monkeypatch):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(7).astype(ml_dtypes.bfloat16),
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "empty": np.zeros((0, 4), np.int32),
        "fp8": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    }
    path = tmp_path / "a.safetensors"
    save(path, arrays, {"format": "pt"})
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == arrays.keys()
    monkeypatch.setattr(safetensors_file, "READ_BYTES", 3)  # pieces of more than one read call
    file = SafetensorsFile(path)
    for name, array in arrays.items():
        assert tuple(loaded[name].shape) == array.shape
        assert loaded[name].float().numpy().tolist() == array.astype(np.float32).tolist()
        np.testing.assert_array_equal(file.read(name), array.reshape(-1))
    assert file.tensors["b"].offset % safetensors_file.HEADER_ALIGN == 0


@pytest.mark.parametrize(
    "array", [np.zeros(4, np.float32), np.zeros((2, 2), np.int32)], ids=["shape", "dtype"]
)
def test_writing_something_else_than_announced(array):
    with pytest.raises(ValueError, match=r"write_safetensors: x must be F32 \[2, 2\], got"):
        write_safetensors(io.BytesIO(), [TensorSpec("x", F32, (2, 2))], [array], {})


def header_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{]", "no valid safetensors file: its header is damaged"),
        (b"[1]", "its header is damaged"),
        ({"x": {"shape": [2]}}, "its header is damaged"),
        (entry(shape=(3,)), r"damaged \(invalid shape, data type, or offset for tensor"),
        (entry(shape=(-2,)), "its header is damaged"),
        (entry(shape=("2",)), "its header is damaged"),
        (
            entry() | {"y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
            "invalid offset for tensor `y`",
        ),
        (entry(shape=(1,), offsets=(4, 8)), "invalid offset for tensor `x`"),
        (entry(offsets=("0", 8)), "its header is damaged"),
        (entry(dtype="F\n99"), "unknown variant `F 99`, expected one of"),
        (b'{"x":' + b"[" * 100_000, "its header is damaged"),
        (entry(shape=(20,), offsets=(0, 80)), "is truncated: .* header says .*; copy it again"),
        (entry(shape=(1,), offsets=(0, 4)), "no valid safetensors file: it has .*; copy it again"),
    ],
)
def test_damaged_headers(tmp_path, header, message):
    path = header_file(tmp_path / "a", header, b"12345678")
    with pytest.raises(LlmqError, match=message) as caught:
        open_foreign(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has only 0 bytes"),
        (b"\xff" * 20, "its header would have"),
        ((100).to_bytes(8, "little") + b"{}", "is truncated: 10 bytes, but its header says 108"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(LlmqError, match=message):
        open_foreign(tmp_path / "a")


def test_a_missing_file(tmp_path):
    with pytest.raises(LlmqError, match="No such file"):
        open_foreign(tmp_path / "a")


def test_an_unknown_element_type_matters_only_when_read(tmp_path):
    path = header_file(tmp_path / "a", entry(dtype="F4", shape=(16,)), b"12345678")
    with pytest.raises(LlmqError, match="x has the unknown element type 'F4'"):
        open_foreign(path).read("x")


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    path = header_file(tmp_path / "a", entry(), b"12345678")
    file = open_foreign(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LlmqError, match=f"'{path}' became shorter while it was read; copy it"):
        file.read("x")
