"""A run's lines about its card, and the speed of light against llm.q's numbers."""

import sys
from types import SimpleNamespace

import pytest

from llmq.base.errors import LlmqError
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.run.monitor import (
    measured_peak,
    speed_of_light,
    system_lines,
    system_record,
)
from llmq.run.training import announce_machine
from llmq.runtime.device import MemorySizes
from llmq.runtime.gpu_info import (
    GpuInfo,
    bus_id,
    gpu_count,
    gpu_info,
    least_free,
    library_versions,
)
from llmq.runtime.host_device import HostDevice
from llmq.runtime.nvml import NvmlGpu
from llmq.runtime.world import World
from tests.fake_nvml import FakeError, FakeGpu, FakeNvml

H100 = "NVIDIA H100 80GB HBM3"
MIB = 1 << 20
BUS_ID = "0000:19:00.0"
INFO = GpuInfo(
    name=H100,
    bus_id=BUS_ID,
    sm_count=132,
    major=9,
    minor=0,
    memory=80_000 * MIB,
    free=30_000 * MIB,
    l2_size=50 * MIB,
    shared_mem=228 << 10,
    ecc=True,
    cuda_driver=13000,
    cuda_runtime=12090,
)


# -- [System] ------------------------------------------------------------------------------------


def test_system():
    record = system_record(3, INFO, NvmlGpu(FakeNvml(), FakeGpu()))
    assert {
        *("id name l2_size sm_count major minor memory free reserved uuid ecc".split()),
        *("shared_mem cuda_driver cuda_runtime".split()),
    } <= set(record)
    assert record["reserved"] == 600 * MIB
    assert system_lines(record) == [
        f"  Device 3: {H100}",
        "  CUDA version: driver 13.0, runtime 12.9",
        "  Memory: 50000 MiB / 80000 MiB",
    ]
    without = system_record(3, INFO, None)
    assert (without["uuid"], without["reserved"], without["driver"]) == ("", 0, "")
    assert set(without) == set(record)


def test_gpu_info(monkeypatch):
    properties = {
        "name": H100.encode(),
        "multiProcessorCount": 132,
        "major": 9,
        "minor": 0,
        "l2CacheSize": 50 * MIB,
        "sharedMemPerMultiprocessor": 228 << 10,
        "ECCEnabled": 1,
    }
    chosen = []
    runtime = SimpleNamespace(
        CUDARuntimeError=FakeError,
        getDeviceProperties=lambda index: properties,
        memGetInfo=lambda: (30_000 * MIB, 80_000 * MIB),
        deviceGetPCIBusId=lambda index: BUS_ID,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
        getDeviceCount=lambda: 3,
        getDevice=lambda: 1,
        setDevice=chosen.append,
    )
    api = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy.cuda", api)
    assert gpu_info(0) == INFO
    assert (gpu_count(), bus_id(0)) == (3, BUS_ID)
    runtime.memGetInfo = lambda: ((30, 20, 40)[chosen[-1]] * MIB, 80_000 * MIB)
    assert least_free(3) == 20 * MIB
    assert chosen == [0, 1, 2, 1]

    def full():
        raise FakeError(2, "cudaErrorMemoryAllocation")

    runtime.memGetInfo = full  # it makes the context, which needs memory
    with pytest.raises(LlmqError, match=r"GPU 0 cannot be opened \(cudaErrorMemoryAllocation\)"):
        gpu_info(0)


def test_libraries_that_do_not_load_are_left_out():
    def missing():
        raise RuntimeError("no driver")

    assert library_versions({"a": missing, "b": lambda: 9190}) == {"b": "9190"}


# -- [Speed of Light] ----------------------------------------------------------------------------


def light(model, name=H100, world_size=1, **options):
    config = make_config({"model": model, "from-scratch": True, "seq-len": 1024, **options})
    return speed_of_light(config, preset(model), name, world_size)


@pytest.mark.parametrize(
    "model, tokens_per_second",  # llm.q's, in thousands
    [("Qwen2.5-0.5B", 319.8), ("Qwen2.5-1.5B", 103.9), ("Qwen2.5-7B", 23.0)],
)
def test_speed_of_light_is_llm_qs(model, tokens_per_second):
    assert round(light(model).tokens_per_second / 1000, 1) == tokens_per_second


@pytest.mark.parametrize(
    "model, tokens_per_second",  # llm.q's, in thousands
    [("Qwen2.5-0.5B", 489.7), ("Qwen2.5-1.5B", 176.9), ("Qwen2.5-7B", 42.2)],
)
def test_speed_of_light_in_fp8_is_llm_qs(model, tokens_per_second):
    found = light(model, **{"matmul-dtype": "e4m3"})
    assert round(found.tokens_per_second / 1000, 1) == tokens_per_second
    lines = found.lines(None)
    assert lines[:2] == ["  Peak BF16:    989.4 TFLOP/s", "  Peak  FP8:   1978.9 TFLOP/s"]
    assert lines[2].endswith("in FP8") and lines[3].endswith("in BF16")
    assert light(model, "NVIDIA A100-SXM4-80GB", **{"matmul-dtype": "e4m3"}) is None
    whole = light(model, **{"matmul-dtype": "e4m3", "head-dtype": "e4m3"})
    assert whole.tokens_per_second > found.tokens_per_second
    assert whole.lines(None)[3].endswith("in FP8") and whole.lines(None)[4].endswith("in BF16")


def test_fp32_is_compared_with_tf32():
    found = light("Qwen2.5-0.5B", **{"model-dtype": "fp32"})
    assert found.lines(None)[0] == "  Peak TF32:    494.7 TFLOP/s"
    assert found.nanoseconds > light("Qwen2.5-0.5B").nanoseconds


def test_lines_and_record():
    found = light("Qwen2.5-0.5B")
    assert found.lines(700.0) == [
        "  Peak BF16:    989.4 TFLOP/s",
        "  Benchmark:    70.7%         of spec sheet",
        "  Blocks:         2.1 GFLOP   in BF16",
        "  LM-Head:      816.8 MFLOP   in BF16",
        "  Attention:    132.1 MFLOP   in BF16",
        "  SOL:         319795 tok/s",
    ]
    assert "Benchmark" not in " ".join(found.lines(None))
    assert found.record() == {
        "blocks": found.flops.blocks,
        "lm_head": found.flops.lm_head,
        "attention": found.flops.attention,
        "tps": found.tokens_per_second,
        "tf32_peak": 494.7,
        "bf16_peak": 989.4,
        "fp16_peak": 989.4,
        "fp8_peak": 1978.9,
        "int8_peak": 1978.8,
    }


def test_unknown_cards_and_models_too_small_to_count_have_none():
    assert light("Qwen2.5-0.5B", name="CPU") is None
    tiny = make_config({"model": "tiny", "from-scratch": True, "seq-len": 16})
    assert speed_of_light(tiny, preset("tiny"), H100, world_size=16) is None


def test_a_run_says_that_its_card_is_unknown():
    def messages(kind, name):
        said = []
        nothing = SimpleNamespace(write=lambda *args, **fields: None)
        reporter = SimpleNamespace(message=said.append, block=lambda *args: None, log=nothing)
        trainer = SimpleNamespace(
            dev=SimpleNamespace(kind=kind, spec=SimpleNamespace(name=name)),
            machine=SimpleNamespace(note=None),
            world=World(),
            ranks=SimpleNamespace(links=None, run=lambda *args: []),
            world_size=1,
        )
        announce_machine(trainer, reporter, [], None)
        return said

    unknown = "No speed of light: of NVIDIA X the peak is not known (llmq/options/cards.py)"
    assert messages("cuda", "NVIDIA X") == [unknown]
    assert messages("cuda", H100) == messages("host", "CPU") == []


class GpuLike(HostDevice):
    kind = "cuda"


def test_measured_peak_uses_the_stack_and_stays_below_its_mark():
    sizes = {n: 3 * 2 * n * n for n in (256, 32)}
    for stack, used in ((sizes[256] + 256, sizes[256]), (sizes[256], sizes[32])):
        dev = GpuLike(MemorySizes(device=0, stack=stack, pinned=0), poison=True)
        assert measured_peak(dev, [*sizes], 1e-4) > 0
        assert dev.stack.high_water_mark == used < stack
    small = GpuLike(MemorySizes(device=0, stack=sizes[32], pinned=0))
    assert measured_peak(small, [*sizes]) is None
    assert measured_peak(HostDevice(MemorySizes(device=0, stack=MIB, pinned=0))) is None
