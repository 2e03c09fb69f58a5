"""cuDNN's fused attention (by the package cudnn-frontend) is a library that CudaDevice launches
like a kernel.

Tensors are passed as integer addresses, because arrays would pass through DLPack, which uses the
legacy stream and so breaks graph capture. An object serves one device and one thread.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from llmq.base.dtypes import BF16, DType
from llmq.base.errors import LlmqError
from llmq.base.stopwatch import START
from llmq.base.tensor import Tensor
from llmq.runtime.attention_parts import HeadGroup, head_groups, split, splits_query_heads
from llmq.runtime.kernel import ceil_div

MIN_CAPABILITY = 80
MAX_BACKWARD_HEAD_DIM = 128
MIN_VERSION = 90100  # cuDNN 9.1 is the first release with a deterministic backward
SLACK = 1 << 20  # bytes for semaphores and rounding inside the library
NATIVE = "use --attention native"
# limit of the forward's workspace, checked at the first call on a GPU
FORWARD_WORKSPACE_BYTES = SLACK


# Sizes have these letters: B sequences of T positions, Hq query heads, Hkv key/value heads, head
# size Hd.


def backward_workspace_bytes(
    B: int, T: int, Hq: int, Hkv: int, Hd: int, deterministic: bool = True
) -> int:
    """Return an estimate of the workspace that the backward requests, in bytes; the first call on a
    GPU checks the estimate. The estimate was fitted to cuDNN 9.19 on an H100, where the error is
    within 2 MiB if T is a multiple of 256 and the head size 64 to 128. The estimate sums F32 dQ, or
    if deterministic a dQ for each block of keys (2 T^2 bytes per head of any size); if Hq > Hkv,
    BF16 dK and dV of every query head; and F32 row sums. T is rounded up to a multiple of 256."""
    padded = 256 * ceil_div(T, 256)
    rows = B * Hq * padded
    d_q = 2 * rows * padded if deterministic else 4 * rows * Hd
    d_kv = 2 * 2 * rows * Hd if Hq > Hkv else 0
    return d_q + d_kv + 4 * rows + SLACK


def divided_workspace_bytes(
    B: int, T: int, Hq: int, Hkv: int, Hd: int, parts: int, deterministic: bool = True
) -> int:
    """Return backward_workspace_bytes of the largest part if the heads are divided into `parts`
    parts."""
    sizes = {_computed(group, Hq, Hkv) for group in head_groups(Hq, Hkv, parts)}
    return max(backward_workspace_bytes(B, T, *n, Hd, deterministic) for n in sizes)


def backward_scratch_bytes(T: int, Hq: int, Hkv: int, Hd: int, parts: int) -> int:
    """Return the scratch bytes of the deterministic backward of one sequence: its workspace and, if
    parts split the query heads of a key/value head, dK and dV of each query head."""
    d_kv = 2 * Hq * T * Hd * BF16.itemsize * splits_query_heads(Hkv, parts)
    return divided_workspace_bytes(1, T, Hq, Hkv, Hd, parts) + d_kv


def _computed(group: HeadGroup, Hq: int, Hkv: int) -> tuple[int, int]:
    """Return the numbers of query and key/value heads of a group, as the library is told. If the
    group has only some query heads of a key/value head, the library is told of one key/value head
    for each query head, all at the same address."""
    whole = group.count * Hkv == group.kv_count * Hq
    return group.sizes if whole else (group.count, group.count)


Layouts = dict[str, dict[str, list[int]]]  # the results of `_layouts` by tensor name


@dataclass(frozen=True, slots=True)
class _Plan:
    """A graph that cuDNN has built for one call. names: the library's id of each tensor, by our
    name. workspace: bytes that the graph needs."""

    graph: Any
    names: dict[str, int]
    workspace: int


class _Scores(NamedTuple):
    """Parameters of the scores. window: number of keys that a query sees, including the key at its
    own position. scale: factor by which scores are multiplied."""

    window: int
    scale: float


class CudnnError(Exception):
    """The library refused to enqueue a call; the message says why."""


def unsupported(capability: int, dtype: DType, head_dim: int) -> str | None:
    """Return the reason why cuDNN attention cannot compute this case; None if cuDNN can.
    capability: compute capability times 10. dtype: the dtype of qkv."""
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability / 10} is below {MIN_CAPABILITY / 10}"
    if dtype != BF16:
        return f"it needs BF16, not {dtype.label}"
    if head_dim % 16 or head_dim > MAX_BACKWARD_HEAD_DIM:
        return f"head size {head_dim} is not a multiple of 16 up to {MAX_BACKWARD_HEAD_DIM}"
    return None


@START.part("loading cuDNN")
def _front_end() -> Any:
    """Import cuDNN's front end with PyTorch hidden, because the front end imports PyTorch for
    seconds only to recognize its tensors."""
    hidden = {} if "torch" in sys.modules else {"torch": None}
    sys.modules.update(hidden)
    try:
        import cudnn
    finally:
        for name in hidden:
            del sys.modules[name]
    return cudnn


class CudnnAttention:
    """Attention forward and backward through cuDNN, for one device. `forward` and `backward` take
    the stream to enqueue on (a cudaStream_t as an integer), and the arguments of the library
    kernels of these names in llmq/ops/attention/attention.py."""

    def __init__(self, device_index: int):
        """Raises LlmqError if the library or its Python front end is missing or too old."""
        try:
            import cupy

            cudnn = _front_end()
            version = cudnn.backend_version()
            if version < MIN_VERSION:
                raise RuntimeError(f"cuDNN {version} is older than {MIN_VERSION}")
            with cupy.cuda.Device(device_index):
                self._handle = cudnn.create_handle()
        # the loader raises many classes, such as ImportError and RuntimeError
        except Exception as error:
            raise LlmqError(
                f"cuDNN attention is not available ({error}); install nvidia-cudnn-cu12 and "
                f"nvidia-cudnn-frontend, or {NATIVE}"
            ) from error
        self._cudnn, self._device_index = cudnn, device_index
        # The front end raises these classes if cuDNN or the front end itself refuses a graph or a
        # call.
        self._refusals = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)
        self.errors = (CudnnError,)  # classes of errors of enqueued calls
        self._plans: dict[tuple, _Plan] = {}

    @classmethod
    def of(cls, device_index: int) -> CudnnAttention:
        """Return the library object that `keep` stored for this device, which is then no longer
        stored, or else a new one."""
        return _kept.pop(device_index, None) or cls(device_index)

    def keep(self) -> None:
        """Store this object, with its plans, for the next caller of `of`."""
        _kept[self._device_index] = self

    def close(self) -> None:
        self._plans.clear()
        self._cudnn.destroy_handle(self._handle)

    def check(
        self,
        B: int,
        *sizes: int,
        chunks: int = 1,
        window: int | None = None,
        scale: float | None = None,
        backward: bool = True,
    ) -> None:
        """Raise LlmqError if the forward or the deterministic backward will not run on this GPU.
        sizes: T, Hq, Hkv, Hd, as defined above. chunks: see attention.backward. window: number of
        keys that a query sees, including the key at its own position; None: all. scale: factor by
        which scores are multiplied; None: 1 / sqrt(Hd). backward: False if only the forward is
        needed."""
        T, Hq, Hkv, Hd = sizes
        scores = _Scores(window or T, scale or Hd**-0.5)
        forward = self._plan("forward", (B, *sizes), False, scores)
        _expect_workspace(forward.workspace, FORWARD_WORKSPACE_BYTES)
        if not backward:
            return
        sequences, parts = split(B, chunks)
        for group in head_groups(Hq, Hkv, parts):
            needed = self._plan("backward", (sequences, *sizes), True, scores, group).workspace
            _expect_workspace(needed, divided_workspace_bytes(sequences, *sizes, parts))

    def forward(self, stream: int, *args: Any) -> None:
        out, lse, qkv, T, Hq, Hkv, _, window, scale, workspace = args
        shape = (qkv.shape[0], T, Hq, Hkv, qkv.shape[3])
        plan = self._plan("forward", shape, False, _Scores(window, scale))
        pointers = {**_packed("", qkv, Hq, Hkv), "out": out.ptr, "lse": lse.ptr}
        self._execute(plan, stream, pointers, workspace)

    def backward(self, stream: int, *args: Any) -> None:
        """Enqueue the attention backward. d_kv: (2, Hq, T, Hd), dK and dV of each query head, if
        `parts` split the query heads of a key/value head (the batch is then 1); else None."""
        d_qkv, d_kv, d_out, out, lse, qkv, workspace, *sizes = args
        deterministic, parts, T, Hq, Hkv, _, window, scale = sizes
        shape = (qkv.shape[0], T, Hq, Hkv, qkv.shape[3])
        head_bytes = qkv.shape[3] * qkv.dtype.itemsize
        for group in head_groups(Hq, Hkv, parts):
            scores = _Scores(window, scale)
            plan = self._plan("backward", shape, bool(deterministic), scores, group)
            heads = (group.first, group.first_kv)
            pointers = {
                **_packed("", qkv, Hq, Hkv, heads),
                **_packed("d_", d_qkv, Hq, Hkv, heads),
                "d_out": d_out.ptr + group.first * head_bytes,
                "out": out.ptr + group.first * head_bytes,
                "lse": lse.ptr + group.first * T * lse.dtype.itemsize,
            }
            if d_kv is not None:
                pointers["d_k"] = d_kv.ptr + group.first * T * head_bytes
                pointers["d_v"] = pointers["d_k"] + Hq * T * head_bytes
            self._execute(plan, stream, pointers, workspace)

    def _execute(
        self, plan: _Plan, stream: int, pointers: dict[str, int], workspace: Tensor
    ) -> None:
        _expect_workspace(plan.workspace, workspace.nbytes)
        buffers = {plan.names[name]: pointer for name, pointer in pointers.items()}
        try:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            plan.graph.execute(buffers, workspace.ptr, handle=self._handle)
        except self._refusals as error:
            raise CudnnError(f"cuDNN {self._cudnn.backend_version()}: {error}") from error

    def _plan(
        self,
        direction: str,
        shape: tuple,
        deterministic: bool,
        scores: _Scores,
        group: HeadGroup | None = None,
    ) -> _Plan:
        """Return the built graph for these sizes. The first call builds the graph in 0.1 s; later
        calls reuse it. direction: "forward" or "backward". shape: (B, T, Hq, Hkv, Hd), where Hq and
        Hkv count all heads. group: the heads to compute; None: all."""
        computed = _computed(group, *shape[2:4]) if group else shape[2:4]
        band = {"diagonal_band_right_bound": 0}  # the causal mask
        if scores.window < shape[1]:  # the library counts the query's own key in the window
            band["diagonal_band_left_bound"] = scores.window
        seen = band.get("diagonal_band_left_bound")
        key = (direction, shape, computed, deterministic, seen, scores.scale)
        if key not in self._plans:
            build = partial(self._forward_graph, scale=scores.scale, band=band)
            if direction == "backward":
                build = partial(
                    self._backward_graph, scale=scores.scale, band=band, deterministic=deterministic
                )
            self._plans[key] = self._build(build, shape, computed)
        return self._plans[key]

    @START.part("planning attention")
    def _build(self, add_nodes: Any, shape: tuple, computed: tuple[int, int]) -> _Plan:
        cudnn = self._cudnn
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )
        try:
            tensors = add_nodes(graph, _layouts(*shape, *computed))
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
        except self._refusals as error:
            raise LlmqError(
                f"cuDNN {cudnn.backend_version()} cannot compute attention of B, T, Hq, Hkv, Hd = "
                f"{(*shape[:2], *computed, shape[-1])} ({error}); {NATIVE}"
            ) from error
        names = {name: tensor.get_uid() for name, tensor in tensors.items()}
        return _Plan(graph, names, graph.get_workspace_size())

    def _forward_graph(
        self, graph: Any, layouts: Layouts, *, scale: float, band: dict[str, int]
    ) -> dict[str, Any]:
        """Add the forward's nodes to the graph; return its tensors by name."""
        q, k, v = (graph.tensor(name=name, **layouts[name]) for name in "qkv")
        out, lse = graph.sdpa(q, k, v, generate_stats=True, attn_scale=scale, **band)
        _output(out, layouts["out"])
        _output(lse, layouts["lse"])
        lse.set_data_type(self._cudnn.data_type.FLOAT)
        return {"q": q, "k": k, "v": v, "out": out, "lse": lse}

    def _backward_graph(
        self,
        graph: Any,
        layouts: Layouts,
        *,
        scale: float,
        band: dict[str, int],
        deterministic: bool,
    ) -> dict[str, Any]:
        """Add the backward's nodes to the graph; return its tensors by name."""
        layouts = layouts | {"d_out": layouts["out"]}
        tensors = {
            name: graph.tensor(name=name, **layouts[name]) for name in (*"qkv", "out", "d_out")
        }
        kind = self._cudnn.data_type.FLOAT
        tensors["lse"] = graph.tensor(name="lse", data_type=kind, **layouts["lse"])
        gradients = graph.sdpa_backward(
            *tensors.values(),
            attn_scale=scale,
            use_deterministic_algorithm=deterministic,
            **band,
        )
        for name, gradient in zip("qkv", gradients, strict=True):
            _output(gradient, layouts[f"d_{name}"])
            tensors[f"d_{name}"] = gradient
        return tensors


_kept: dict[int, CudnnAttention] = {}  # objects that `keep` stored, by device index


def _expect_workspace(needed: int, planned: int) -> None:
    if needed > planned:
        raise LlmqError(
            f"cuDNN attention asks for a workspace of {needed} bytes, {planned} were planned; "
            f"{NATIVE}"
        )


def _packed(
    prefix: str, qkv: Tensor, Hq: int, Hkv: int, heads: tuple[int, int] = (0, 0)
) -> dict[str, int]:
    """Return the addresses of one query, key and value head in a tensor (B, T, Hq + 2 Hkv, Hd).
    heads: indices of the query head and of the key/value head."""
    head_bytes = qkv.shape[3] * qkv.dtype.itemsize
    head, kv_head = heads
    indices = {"q": head, "k": Hq + kv_head, "v": Hq + Hkv + kv_head}
    return {prefix + name: qkv.ptr + index * head_bytes for name, index in indices.items()}


def _layouts(
    batch: int, seq_len: int, heads: int, kv_heads: int, head_dim: int, count: int, kv_count: int
) -> Layouts:
    """Return dim and stride, in elements, of each tensor in the library's order (B, H, T, Hd).
    count, kv_count: numbers of query and key/value heads to compute, from `_computed`."""

    def rows(num_heads: int, row: int, head: int = head_dim) -> dict[str, list[int]]:
        return {
            "dim": [batch, num_heads, seq_len, head_dim],
            "stride": [seq_len * row, head, row, 1],
        }

    packed = (heads + 2 * kv_heads) * head_dim
    # the group has some of the query heads of a key/value head
    shared = kv_heads < heads and count == kv_count
    keys = rows(kv_count, packed, 0 if shared else head_dim)
    apart = rows(count, head_dim, seq_len * head_dim)  # a range of heads in (Hq, T, Hd)
    return {
        "q": rows(count, packed),
        "k": keys,
        "v": keys,
        "d_q": rows(count, packed),
        "d_k": apart if shared else keys,
        "d_v": apart if shared else keys,
        "out": rows(count, heads * head_dim),
        "lse": {"dim": [batch, count, seq_len, 1], "stride": [heads * seq_len, seq_len, 1, 1]},
    }


def _output(tensor: Any, layout: dict[str, list[int]]) -> None:
    tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
