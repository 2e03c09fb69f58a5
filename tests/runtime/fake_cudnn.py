"""A stand-in for the modules `cudnn` and `cupy`: graphs whose execution is the NumPy reference."""

import contextlib
import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from llmq.ref.attention import attention as ref

HANDLE = 77
VERSION = 91900
DTYPES = {"bf16": ml_dtypes.bfloat16, "f32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}


class FakeTensor:
    """dim and stride in elements; itemsize 2 is BF16, 4 is F32."""

    def __init__(self, dim=None, stride=None, data_type="bf16", name=""):
        self.dim, self.stride, self.data_type, self.name = dim, stride, data_type, name
        self.output = False

    def set_output(self, output):
        self.output = output
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def get_uid(self):
        return id(self)

    def at(self, address):
        """The elements at this address, as (B, T, H, D)."""
        dtype = np.dtype(DTYPES[self.data_type])
        last = sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))
        raw = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(address)
        flat = np.frombuffer(raw, dtype)
        strides = [s * dtype.itemsize for s in self.stride]
        return np.lib.stride_tricks.as_strided(flat, self.dim, strides).transpose(0, 2, 1, 3)


class FakeGraph:
    """One attention node; `workspace` bytes are what it asks for."""

    def __init__(self, library, **types):
        assert types["io_data_type"] == "bf16" and types["compute_data_type"] == "f32"
        self.library, self.steps = library, []

    def tensor(self, **layout):
        return FakeTensor(**layout)

    def sdpa(self, *inputs, **options):
        self.inputs, self.options = inputs, options
        self.outputs = [FakeTensor() for _ in range(2)]
        return self.outputs

    def sdpa_backward(self, *inputs, **options):
        self.inputs, self.options = inputs, options
        self.outputs = [FakeTensor() for _ in range(3)]
        return self.outputs

    def __getattr__(self, step):  # validate, build_operation_graph, ...
        return lambda *arguments: self.steps.append(step)

    def check_support(self):
        if self.library.refuses:
            raise self.library.refuses("no engine")

    def get_workspace_size(self):
        assert self.steps[-1] == "build_plans"
        self.library.built += 1
        return self.library.workspace

    def execute(self, buffers, workspace, handle):
        assert handle == HANDLE and all(t.output for t in self.outputs)
        assert {type(x) for x in (*buffers.values(), workspace)} == {int}
        if self.library.fails:
            raise self.library.fails("execution failed")
        self.library.executed.append((self.library.stream, self.options))
        arrays = [t.at(buffers[t.get_uid()]) for t in (*self.inputs, *self.outputs)]
        q, k, v = arrays[:3]
        sizes = (q.shape[1], q.shape[2], k.shape[2])
        window = self.options.get("diagonal_band_left_bound") or q.shape[1]
        mask = (None, window, self.options["attn_scale"])
        qkv = np.concatenate([q, k, v], axis=2)
        if len(self.outputs) == 2:
            lse = np.empty((len(q), sizes[1], sizes[0]), np.float32)
            ref.attention_forward(arrays[3], lse, qkv, *sizes, *mask)
            arrays[4][...] = lse.transpose(0, 2, 1)[..., None]
            return
        out, d_out, lse = arrays[3:6]
        d_qkv, lse = np.empty_like(qkv), lse[..., 0].transpose(0, 2, 1)
        ref.attention_backward(d_qkv, None, d_out, out, lse, qkv, None, 1, 1, *sizes, *mask)
        parts = np.split(d_qkv, (sizes[1], sizes[1] + sizes[2]), axis=2)
        for target, part in zip(arrays[6:], parts, strict=True):
            target[...] = part


class FakeCudnn:
    """The module `cudnn`. refuses, fails: what planning and running raise, if not None."""

    data_type = SimpleNamespace(BFLOAT16="bf16", FLOAT="f32", FP8_E4M3="e4m3")
    heur_mode = SimpleNamespace(A="A")
    cudnnGraphNotSupportedError = NotImplementedError

    def __init__(self, workspace=4096, version=VERSION):
        self.workspace, self.version = workspace, version
        self.refuses, self.fails = None, None
        self.built, self.executed, self.stream, self.open = 0, [], None, 0

    def create_handle(self):
        self.open += 1
        return HANDLE

    def destroy_handle(self, handle):
        assert handle == HANDLE
        self.open -= 1

    def backend_version(self):
        return self.version

    def set_stream(self, handle, stream):
        assert handle == HANDLE
        self.stream = stream

    def pygraph(self, *, handle, **types):
        assert handle == HANDLE
        return FakeGraph(self, **types)


def fake_cupy():
    """The module `cupy`."""
    return SimpleNamespace(cuda=SimpleNamespace(Device=lambda i: contextlib.nullcontext()))
