"""CudaDevice and its graphs on fake CUDA bindings: everything but the GPU's own work."""

import gc
import struct
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, F32
from llmq.base.errors import LlmqError
from llmq.ops.pointwise import elementwise
from llmq.runtime import cublaslt, cuda_api, cuda_kernels
from llmq.runtime.compile import Cubin, Resources
from llmq.runtime.cuda_api import device_spec
from llmq.runtime.cuda_device import CudaDevice
from llmq.runtime.device import FUSED, MemorySizes
from llmq.runtime.kernel import Kernel, KernelSource
from llmq.runtime.pinned import PinnedMemory
from llmq.runtime.product import Product
from tests.conftest import gpu_problem
from tests.runtime.fake_cuda import PINNED_LIMIT, CudaError, FakeApi

SIZES = MemorySizes(device=1 << 16, stack=1 << 16, pinned=1 << 12)
SCALE = Kernel("fake.cu", "scale", args="out T[*y] y, T[*x]? x, f32 a, i32 b, u32 c, i64 d, f64 e")
OTHER = Kernel("fake.cu", "other", args="inout f32[*y] y")
LIBRARY = Kernel("product/matmul", "matmul", args="out f32[*out] out")


@pytest.fixture
def api(monkeypatch):
    api = FakeApi()
    api.num_args |= {"scale": 7, "other": 1}
    monkeypatch.setattr(cuda_api, "load", lambda: api)
    monkeypatch.delenv("LLMQ_SYNC", raising=False)
    compiled = []

    def compile_kernel(source, capability):
        compiled.append((source.entry, dict(source.types), dict(source.consts), capability))
        needs = Resources(registers=0, shared=0, spilled=0, stack=0, serialized=False)
        return Cubin(path=Path(f"{len(compiled)}.cubin"), code=b"", resources=needs)

    monkeypatch.setattr(cuda_kernels, "compile_kernel", compile_kernel)
    api.compiled = compiled
    return api


@pytest.fixture
def dev(api):
    device = CudaDevice(0, SIZES)
    yield device
    device.close()


def tensor(dev, values=(0.0,), dtype=F32):
    array = np.asarray(values, dtype.numpy)
    out = dev.alloc("x", array.shape, dtype, "Activations")
    dev.upload(out, array)
    return out


# -- which GPU --


def test_spec(api):
    spec = device_spec(0)
    assert (spec.name, spec.capability, spec.num_sms) == ("Fake GPU", 90, 132)
    with closing(CudaDevice(0, SIZES, num_sms=170)) as device:  # of a larger GPU beside it
        assert (device.spec.name, device.num_sms) == ("Fake GPU", 170)


def test_a_gpu_that_chooses_as_an_older_one(api, monkeypatch):
    """Kernels are compiled for the GPU's own capability."""
    monkeypatch.setenv("LLMQ_CAPABILITY", "89")
    with closing(CudaDevice(0, SIZES)) as device:
        assert (device.spec.capability, device._kernels._capability) == (89, 90)
    monkeypatch.setenv("LLMQ_CAPABILITY", "8.9")
    with pytest.raises(LlmqError, match=r"LLMQ_CAPABILITY: '8\.9' is no number as 89"):
        device_spec(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"driver_version": 0}, "no NVIDIA driver"),
        ({"driver_version": 11080}, r"supports CUDA 11\.8 .* needs 12\.9; update the driver$"),
        (
            {"driver_version": 12080, "runtime_version": 13000},
            r"supports CUDA 12\.8 .* needs 13\.0; update the driver, or install cupy-cuda12x$",
        ),
        (
            {"devices": 0},
            r"no NVIDIA GPU can be used \(cudaErrorNoDevice.*\); see nvidia-smi, CUDA_VISIBLE_DEV"
            "ICES is 7$",
        ),
        ({"properties": {"major": 7, "minor": 5, "name": b"T4"}}, r"GPU 0 \(T4\) .* 7.5, 8.0"),
    ],
)
def test_gpus_that_cannot_be_used(api, change, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    vars(api.runtime).update(change)
    with pytest.raises(LlmqError, match=message):
        device_spec(0)


def failing(error):
    def fail(*args):
        raise CudaError(error)

    return fail


def test_a_driver_that_is_none(api, monkeypatch):
    """The library that toolkits have for linking."""
    monkeypatch.setattr(api.runtime, "driverGetVersion", failing("cudaErrorStubLibrary"))
    with pytest.raises(LlmqError, match=r"no NVIDIA GPU can be used \(cudaErrorStubLibrary\)"):
        device_spec(0)


@pytest.mark.parametrize("call", ["setDevice", "memGetInfo"])
def test_a_gpu_that_others_have(api, monkeypatch, call):
    """With no memory for a context, or in exclusive mode."""
    monkeypatch.setattr(api.runtime, call, failing("cudaErrorMemoryAllocation"))
    with pytest.raises(LlmqError, match=r"GPU 0 \(Fake GPU\) cannot be opened \(cudaErrorMemor"):
        CudaDevice(0, SIZES)


def test_a_newer_minor_release_of_the_driver_is_fine(api):
    api.runtime.driver_version, api.runtime.runtime_version = 13000, 12090
    assert device_spec(0)
    api.runtime.driver_version = 12020
    assert device_spec(0)


def test_a_gpu_that_is_not_there(api):
    with pytest.raises(LlmqError, match=r"GPU 1 is asked for, there are 1; .*CUDA_VISIBLE_DEVICES"):
        device_spec(1)


def test_too_little_memory(api):
    api.runtime.free_bytes = SIZES["device"]
    with pytest.raises(LlmqError, match=r"GPU 0 \(Fake GPU\): .* GiB are needed, .* GiB are free"):
        CudaDevice(0, SIZES)


def test_too_much_pinned_memory(api):
    sizes = MemorySizes(device=0, stack=0, pinned=PINNED_LIMIT + 1)
    with pytest.raises(LlmqError, match=r"cannot pin 0\.1 GiB .*`ulimit -l`"):
        CudaDevice(0, sizes)
    sizes = MemorySizes(device=0, stack=0, pinned=1, write_combined=PINNED_LIMIT + 1)
    with pytest.raises(LlmqError, match=r"cannot pin 0\.1 GiB"):
        CudaDevice(0, sizes)
    assert not api.runtime.buffers  # what had been taken is given back


def test_pinned_memory_that_is_forgotten_stays_mapped(api):
    """Unmapped addresses would be used again while the driver still knows them as pinned."""
    used = set()
    for _ in range(3):
        memory = PinnedMemory(api.runtime, 1 << 20)
        memory.storage.bytes[:] = 7
        used.add(memory.storage.base)
        del memory
        gc.collect()
    assert len(used) == 3
    again = [PinnedMemory(api.runtime, 1 << 20) for _ in range(2)]
    assert not used & {memory.storage.base for memory in again}
    for memory in again:
        memory.free()
    assert set(api.runtime.buffers) == used


# -- memory and copies --


def test_one_allocation_holds_arena_and_stack(api, dev):
    x = dev.alloc("x", (8,), F32, "Activations")
    with dev.scratch("y", (8,), F32) as y:
        assert y.ptr - x.ptr == SIZES["device"]
    assert api.runtime.calls.count(f"malloc {SIZES['device'] + SIZES['stack']}") == 1


def test_upload_copy_zero_download(dev):
    x = tensor(dev, [1.0, 2.0, 3.0, 4.0], BF16)
    pinned = dev.alloc("pinned", (4,), BF16, "Activations", place="pinned")
    y = tensor(dev, [0.0] * 4, BF16)
    dev.copy(pinned, x)
    assert pinned.numpy().tolist() == [1.0, 2.0, 3.0, 4.0]  # the host sees pinned memory
    dev.copy(y, pinned)
    np.testing.assert_array_equal(dev.download(y), dev.download(x))
    dev.zero(x)
    assert dev.download(x).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="differ in size"):
        dev.copy(x, tensor(dev, [1.0]))
    with pytest.raises(ValueError, match="upload: "):
        dev.upload(x, np.zeros(4, np.float32))


def test_close_gives_everything_back(api):
    device = CudaDevice(0, SIZES)
    x = tensor(device)
    for _ in range(2):
        device.graph(("g",), lambda: device.launch(OTHER, 1, 32, (x,)))
    device.event()
    device.close()
    assert api.runtime.live == set()
    assert api.runtime.buffers == {}


# -- launches --


def test_arguments_are_packed_by_their_declared_types(api, dev):
    y = tensor(dev, [0.0], BF16)
    dev.launch(SCALE, (2, 3), 64, (y, None, 1, -1, 2**32 - 1, -(2**40), 0.5), smem=16)
    entry, grid, block, shared, stream, slots = api.launches[-1]
    assert (entry, grid, block, shared) == ("scale", (2, 3, 1), (64, 1, 1), 16)
    assert stream == dev.stream
    packed = struct.pack("<7Q", *slots)
    assert struct.unpack("<QQf4xi4xI4xqd", packed) == (
        *(y.ptr, 0, 1.0, -1, 2**32 - 1, -(2**40), 0.5),
    )


def test_each_variant_is_compiled_and_loaded_once(api, dev):
    rest = (None, 1.0, 0, 0, 0, 0.0)
    for _ in range(2):
        for dtype in (F32, BF16):
            dev.launch(SCALE, 1, 32, (tensor(dev, [0.0], dtype), *rest), consts={"N": 1})
        dev.launch(OTHER, 1, 32, (tensor(dev),))
    assert api.compiled == [
        ("scale", {"T": "f32"}, {"N": 1}, 90),
        ("scale", {"T": "bf16"}, {"N": 1}, 90),
        ("other", {}, {}, 90),
    ]
    assert len(api.loaded) == 3


def test_large_shared_memory_is_asked_for_once_per_size(api, dev):
    x = tensor(dev)
    for smem in (1000, 60_000, 50_000, 60_000, 70_000):
        dev.launch(OTHER, 1, 32, (x,), smem=smem)
    assert api.shared == [("other", 60_000), ("other", 70_000)]
    second = CudaDevice(0, SIZES)  # CuPy gives it the same module
    second.launch(OTHER, 1, 32, (tensor(second),), smem=65_000)
    assert api.shared[-1] == ("other", 70_000)
    second.close()


def test_an_error_names_kernel_and_launch(api, dev):
    api.refused.add("other")
    launch = r"other: CUDA_ERROR_INVALID_VALUE.*grid 7, block 33.*"
    with pytest.raises(RuntimeError, match=launch + "enqueued earlier, LLMQ_SYNC=1"):
        dev.launch(OTHER, 7, 33, (tensor(dev),))
    dev._sync_launches = True
    with pytest.raises(RuntimeError, match=launch + r"arguments .*\)$"):
        dev.launch(OTHER, 7, 33, (tensor(dev),))


def test_with_sync_an_error_while_it_runs_names_kernel_and_launch(api, monkeypatch):
    monkeypatch.setenv("LLMQ_SYNC", "1")
    device = CudaDevice(0, SIZES)
    x = tensor(device)
    monkeypatch.setattr(api.runtime, "streamSynchronize", failing("cudaErrorIllegalAddress"))
    with pytest.raises(RuntimeError, match=r"^other: cudaErrorIllegalAddress \(rank 0, grid 7,"):
        device.launch(OTHER, 7, 33, (x,))


@pytest.mark.parametrize(
    ("call", "use", "name"),
    [
        ("eventSynchronize", lambda dev, x: dev.event().synchronize(), "waiting for the GPU"),
        ("deviceSynchronize", lambda dev, x: dev.synchronize(), "waiting for the GPU"),
        ("streamSynchronize", lambda dev, x: dev.synchronize_stream(), "waiting for the GPU"),
        ("memcpyAsync", lambda dev, x: dev.copy(x, x), "copying 4 bytes"),
        ("graphLaunch", lambda dev, x: dev.graph(("g",), lambda: dev.zero(x)), "graph ('g',)"),
        ("graphInstantiate", lambda dev, x: dev.graph(("h",), lambda: None), "graph ('h',)"),
    ],
)
def test_whoever_notices_an_error_says_how_to_find_its_cause(
    api, dev, monkeypatch, call, use, name
):
    x = tensor(dev)
    for _ in range(2):
        dev.graph(("g",), lambda: dev.zero(x))
    dev.graph(("h",), lambda: None)
    with monkeypatch.context() as broken:
        broken.setattr(api.runtime, call, failing("cudaErrorIllegalAddress"))
        with pytest.raises(RuntimeError) as caught:
            use(dev, x)
    assert str(caught.value).startswith(f"{name}: cudaErrorIllegalAddress; ")
    assert "LLMQ_SYNC=1" in str(caught.value)


def test_an_error_of_a_library_names_the_launch(dev, monkeypatch):
    class Refused(Exception):
        pass

    class Library:
        errors = (Refused,)

        def __init__(self, *args, **kwargs):
            pass

        def matmul(self, *args):
            raise Refused("CUBLAS_STATUS_EXECUTION_FAILED (13)")

        def close(self):
            pass

    monkeypatch.setattr(cublaslt, "CublasLt", Library)
    message = r"matmul: CUBLAS_STATUS_EXECUTION_FAILED \(13\) \(rank 0, .*arguments .*LLMQ_SYNC"
    with pytest.raises(RuntimeError, match=message):
        dev.launch(LIBRARY, 1, 1, (tensor(dev),))


def test_libraries_get_the_stream_and_the_arguments(dev):
    calls = []

    class Library:
        def matmul(self, *args):
            calls.append(args)

        def close(self):
            calls.append("closed")

    dev._libraries["matmul"] = Library()
    x = tensor(dev)
    with dev.on("copy"):
        dev.launch(LIBRARY, 1, 1, (x,))
        assert calls == [(dev.stream, x)]
    dev._libraries.clear()


def test_which_products_accumulate_fast(dev):
    assert dev.fast_products() == {}
    sizes = (48, 144, 64, False, True, E4M3, E4M3, BF16, False, False, 4096)
    plans = {}
    for bias, allowed, chosen in ((False, True, True), (True, True, False), (True, False, False)):
        product = Product(*sizes, fast_accumulation=allowed)._replace(bias=bias)
        plans[product] = SimpleNamespace(choice=SimpleNamespace(fast=chosen))
    dev._libraries["matmul"] = SimpleNamespace(plans=plans)
    found = dev.fast_products()
    dev._libraries.clear()
    name = "48x144x64 nt e4m3->bf16{} fast, 4096 bytes of workspace"
    assert found == {name.format(""): True, name.format(" bias"): False}
    for name in FUSED:  # ours have no other way, but for exact ones
        for dtype in ("bf16", "e4m3"):
            types = ("A", dtype), ("B", dtype)
            for constant in ("RANK", 16), ("EXACT", 1):
                source = KernelSource(f"{name}.cu", name, types, (constant,))
                dev._kernels._loaded[source] = None
    found = dev.fast_products()
    dev._kernels._loaded.clear()
    assert found == {f"{name} A=e4m3 B=e4m3 RANK=16": True for name in FUSED}


def test_kernels_of_another_capability(dev):
    kernel = Kernel(
        "hopper.cu", "hopper", args="out f32[*x] x", capability=dev.spec.capability + 10
    )
    with pytest.raises(LlmqError, match=r"hopper is for GPUs of compute capability .*, this one"):
        dev.launch(kernel, 1, 1, (tensor(dev),))


def test_sync_mode_waits_for_every_launch_and_uses_no_graphs(api, monkeypatch):
    monkeypatch.setenv("LLMQ_SYNC", "1")
    device = CudaDevice(0, SIZES)
    x = tensor(device)
    before = device.sync_calls
    for _ in range(3):
        device.graph(("g",), lambda: device.launch(OTHER, 1, 32, (x,)))
    assert device.sync_calls == before + 3
    assert "graphLaunch" not in api.runtime.calls


# -- graphs --


def test_eager_then_captured_then_replayed(api, dev):
    x, calls = tensor(dev), []

    def fn():
        calls.append(api.runtime.capture is not None)
        dev.last_operation = "all_gather x"
        dev.launch(OTHER, 1, 32, (x,))

    for run in range(4):
        dev.graph(("step",), fn)
        assert len(api.launches) == run + 1
        assert dev.last_operation == ("all_gather x" if run < 2 else "one of graph step")
    assert calls == [False, True]  # eager, captured
    assert api.runtime.calls.count("graphLaunch") == 3
    dev.graph(("other key",), fn)
    assert calls == [False, True, False]


def test_capture_only_runs_nothing(api, dev):
    x, calls = tensor(dev), []
    dev.launch(OTHER, 1, 32, (x,))

    def fn():
        calls.append(api.runtime.capture is not None)
        dev.launch(OTHER, 1, 32, (x,))

    with dev.capture_only():
        for _ in range(2):
            dev.graph(("step",), fn)
    assert calls == [True]
    assert len(api.launches) == 1
    assert "graphLaunch" not in api.runtime.calls
    assert api.runtime.calls.count("graphUpload") == 1
    for run in range(2):  # replayed from the start
        dev.graph(("step",), fn)
        assert len(api.launches) == 2 + run
    assert calls == [True]


def test_forgotten_graphs_are_captured_again(api, dev):
    """Without a direct run: everything is loaded."""
    x, calls = tensor(dev), []

    def fn():
        calls.append(api.runtime.capture is not None)
        dev.launch(OTHER, 1, 32, (x,))

    for _ in range(3):
        dev.graph(("step",), fn)
    dev.forget_graphs()
    for _ in range(2):
        dev.graph(("step",), fn)
    assert calls == [False, True, True]
    assert len(api.launches) == 5


def test_without_graphs_nothing_is_remembered(api, dev):
    x = tensor(dev)
    with dev.without_graphs():
        for _ in range(3):
            dev.graph(("step",), lambda: dev.launch(OTHER, 1, 32, (x,)))
        with dev.capture_only():
            dev.graph(("step",), lambda: dev.launch(OTHER, 1, 32, (x,)))
    assert len(api.launches) == 3
    dev.graph(("step",), lambda: dev.launch(OTHER, 1, 32, (x,)))
    assert "graphLaunch" not in api.runtime.calls


def test_nothing_is_loaded_while_capturing(api, dev):
    x = tensor(dev)
    dev.graph(("g",), lambda: None)
    with pytest.raises(RuntimeError, match=r"other: .*RawModule"):
        dev.graph(("g",), lambda: dev.launch(OTHER, 1, 32, (x,)))
    assert api.runtime.capture is None  # the stream can be used again
    dev.launch(OTHER, 1, 32, (x,))
    assert len(api.launches) == 1


def test_side_streams_fork_and_join(api, dev):
    x, y = tensor(dev, [1.0]), tensor(dev, [0.0])
    done = dev.event()

    def fn():
        with dev.on("copy"):
            dev.copy(y, x)
            dev.record(done)
        dev.launch(OTHER, 1, 32, (x,))
        dev.wait(done)

    def fn_without_wait():
        with dev.on("comm"):
            dev.copy(y, x)

    for _ in range(3):
        dev.graph(("waits",), fn)
        dev.graph(("joined by the end",), fn_without_wait)
    dev.zero(y)
    dev.graph(("waits",), fn)
    assert dev.download(y).tolist() == [1.0]


def test_events_cross_the_borders_of_graphs(api, dev):
    x = tensor(dev)
    before, inside = dev.event(), dev.event()
    dev.record(before)

    def fn():
        dev.wait(before)  # recorded outside: needs an external wait
        dev.launch(OTHER, 1, 32, (x,))
        dev.record(inside)

    for _ in range(3):
        dev.graph(("g",), fn)
    # After a replay the event counts as recorded at the graph's end, on the main stream.
    assert api.runtime.calls[-1] == f"eventRecord {inside.handle} {dev.stream}"
    with dev.on("copy"):
        dev.wait(inside)
    assert api.runtime.calls[-1].endswith(f"{inside.handle} 0")


def test_a_replay_with_other_addresses_is_an_error(dev):
    x = tensor(dev)
    for _ in range(2):
        dev.graph(("g",), lambda: dev.zero(x))
    with (
        dev.scratch("more", (8,), F32),
        pytest.raises(RuntimeError, match=r"graph \('g',\): captured with 0 bytes"),
    ):
        dev.graph(("g",), lambda: dev.zero(x))


def test_the_host_may_not_wait_inside_a_capture(dev):
    x = tensor(dev)
    dev.graph(("g",), lambda: None)
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        dev.graph(("g",), lambda: dev.download(x))


def test_graphs_run_on_the_main_stream_only(dev):
    with dev.on("copy"), pytest.raises(RuntimeError, match="main stream"):
        dev.graph(("g",), lambda: None)


def test_a_cuda_error_in_a_capture_says_how_to_do_without(dev):
    def broken():
        raise CudaError("cudaErrorStreamCaptureInvalidated")

    dev.graph(("g",), lambda: None)
    with pytest.raises(
        RuntimeError, match=r"graph \('g',\): capture failed .*--no-use-cuda-graphs"
    ):
        dev.graph(("g",), broken)


def test_steady_state_never_waits(api, dev):
    x = tensor(dev)
    for _ in range(2):
        dev.graph(("g",), lambda: dev.launch(OTHER, 1, 32, (x,)))
    before = dev.sync_calls
    for _ in range(3):
        dev.graph(("g",), lambda: dev.launch(OTHER, 1, 32, (x,)))
    assert dev.sync_calls == before
    dev.synchronize()
    event = dev.event()
    event.synchronize()
    assert dev.sync_calls == before + 2


def test_ranges(api, dev):
    with dev.range("outer"), dev.range("inner"):
        pass
    assert api.nvtx.ranges == ["outer", "inner", "pop", "pop"]


# -- the same on a GPU --


@pytest.fixture
def gpu():
    if problem := gpu_problem():
        pytest.skip(problem)
    size = 64 << 20
    device = CudaDevice(0, MemorySizes(device=4 * size, stack=0, pinned=size))
    yield device
    device.close()


@pytest.mark.gpu
def test_streams_and_events_in_and_around_graphs_on_a_gpu(gpu):
    n = 8 << 20  # 32 MiB: the copies take long enough to be overtaken if the order were wrong
    x, y, z = (gpu.alloc(name, (n,), F32, "Activations") for name in "xyz")
    pinned = gpu.alloc("pinned", (n,), F32, "Activations", place="pinned")
    arrived, doubled = gpu.event(), gpu.event()

    def fn():
        gpu.wait(arrived)  # recorded outside
        gpu.copy(y, x)
        with gpu.on("copy"):
            gpu.copy(z, x)
            gpu.record(doubled)
        gpu.wait(doubled)
        elementwise.fill(gpu, x, -1.0)

    for run in range(5):
        pinned.numpy()[...] = run
        with gpu.on("copy"):
            gpu.copy(x, pinned)
            gpu.record(arrived)
        gpu.graph(("g",), fn)
        with gpu.on("comm"):  # after the graph, by an event that it records
            gpu.wait(doubled)
            gpu.copy(pinned, z)
        gpu.synchronize()
        assert (pinned.numpy() == run).all()
        assert (gpu.download(y) == run).all()
        assert (gpu.download(x) == -1.0).all()


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_a_gpu_usable(gpu):
    x = gpu.alloc("x", (1024,), F32, "Activations")
    gpu.graph(("g",), lambda: None)
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        gpu.graph(("g",), gpu.synchronize)
    elementwise.fill(gpu, x, 2.0)
    assert (gpu.download(x) == 2.0).all()


@pytest.mark.gpu
def test_a_refused_launch_names_the_kernel_on_a_gpu(gpu):
    x = gpu.alloc("x", (1024,), F32, "Activations")
    with pytest.raises(RuntimeError, match=r"fill: CUDA_ERROR_INVALID_VALUE.* block 4096"):
        gpu.launch(elementwise.FILL, 1, 4096, (x, 1.0, 1024))
