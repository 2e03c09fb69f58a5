"""Readings of a GPU from a stand-in for NVML, and the speed of light against llm.q's numbers."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from llmq.base.errors import LlmqError
from llmq.config.options_io import make_config
from llmq.config.presets import preset
from llmq.runtime import gpu_info as gpu_info_module
from llmq.runtime.device import MemorySizes
from llmq.runtime.gpu_info import GpuInfo, bus_id, gpu_count, gpu_info, least_free
from llmq.runtime.host_device import HostDevice
from llmq.train import monitor as monitor_module
from llmq.train.announce import announce_machine
from llmq.train.monitor import (
    GpuMonitor,
    load_nvml,
    measured_peak,
    monitor_line,
    open_monitor,
    speed_of_light,
    system_lines,
    system_record,
)

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


class FakeError(Exception):
    pass


class FakeNvml:
    """NVML of a machine with one GPU whose handle is its bus id; `broken` calls are refused."""

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = "sm", "gpu", "slow"
    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = "rx", "tx"
    nvmlMemory_v2 = 2

    def __init__(self, *broken, delay=0.0):
        self.broken, self.delay = set(broken), delay
        self.reasons = 0
        self.utilization = 90
        self.threads = set()

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        if bus_id != BUS_ID:
            raise FakeError("Not Found")
        return bus_id

    def __getattr__(self, name):
        values = {
            "nvmlDeviceGetClockInfo": lambda kind: {"sm": 1755}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda kind: {"sm": 1980}[kind],
            "nvmlDeviceGetFanSpeed": lambda: 30,
            "nvmlDeviceGetPowerUsage": lambda: 651_234,
            "nvmlDeviceGetEnforcedPowerLimit": lambda: 700_000,
            "nvmlDeviceGetTemperature": lambda kind: {"gpu": 61}[kind],
            "nvmlDeviceGetTemperatureThreshold": lambda kind: {"slow": 89}[kind],
            "nvmlDeviceGetMemoryInfo": lambda version=1: SimpleNamespace(
                free=20 * MIB, **({"reserved": 600 * MIB} if version == 2 else {})
            ),
            "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(
                gpu=self.utilization, memory=40
            ),
            "nvmlDeviceGetPcieThroughput": lambda kind: {"rx": 5000, "tx": 7000}[kind],
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: self.reasons,
            "nvmlDeviceGetTotalEnergyConsumption": lambda: 123_456,
            "nvmlDeviceGetUUID": lambda: "GPU-5c57ee15-34b0-285a-5748-50b4b0975c8c",
        }

        def call(handle, *args):
            assert handle == BUS_ID
            self.threads.add(threading.current_thread().name)
            time.sleep(self.delay)
            if name in self.broken:
                raise FakeError("Not Supported")
            return values[name](*args)

        if name not in values:
            raise AttributeError(name)
        return call

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"


@pytest.fixture
def opened():
    """GpuMonitors that are closed after the test; an hour between rounds unless said."""
    monitors = []

    def make(nvml, interval=3600.0):
        monitors.append(GpuMonitor(nvml, BUS_ID, 3, interval))
        return monitors[-1]

    yield make
    for monitor in monitors:
        monitor.close()


def test_record_has_llm_qs_fields(opened):
    assert opened(FakeNvml()).sample() == {
        "id": 3,
        "clock": 1755,
        "max_clock": 1980,
        "fan": 30,
        "power": 651_234,
        "power_limit": 700_000,
        "temperature": 61,
        "temp_slowdown": 89,
        "gpu_util": 90,
        "mem_util": 40,
        "throttle": "no cap",
        "dram_free": 20 * MIB,
        "pcie_rx": 5_000_000,
        "pcie_tx": 7_000_000,
    }


def test_what_the_card_does_not_tell(opened):
    refused = ("FanSpeed", "UtilizationRates", "PcieThroughput", "TemperatureThreshold")
    nvml = FakeNvml(
        *(f"nvmlDeviceGet{name}" for name in refused),
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMemoryInfo",
    )
    monitor = opened(nvml)
    sample = monitor.sample()
    unsupported = {name for name, value in sample.items() if value == -1}
    assert unsupported == {
        *("fan", "gpu_util", "mem_util", "pcie_rx", "pcie_tx", "temp_slowdown", "dram_free")
    }
    assert sample["throttle"] == "not supported"
    assert sample["power"] == 651_234
    assert monitor.joules() is None
    assert monitor.identity() == {"driver": "580.159.04", "uuid": "", "reserved": 0}
    assert monitor_line(sample) == (
        "GPU 3: - % | 651 / 700 W | 61 / - °C | 1,755 / 1,980 MHz, not supported | "
        "- MiB free | PCIe ↓ - ↑ - MiB/s"
    )


@pytest.mark.parametrize(
    "reasons, word",
    [
        (0x0, "no cap"),
        (0x1, "idle"),
        (0x4, "power cap"),
        (0x80 | 0x8, "power cap"),
        (0x20, "thermal cap"),
        (0x40 | 0x8, "thermal cap"),
        (0x2, "other cap"),
        (0x100, "other cap"),
    ],
)
def test_throttle_reasons(opened, reasons, word):
    nvml = FakeNvml()
    nvml.reasons = reasons
    assert opened(nvml).sample()["throttle"] == word


def test_rates_are_averages_since_the_last_sample(opened):
    nvml = FakeNvml()
    monitor = opened(nvml)
    nvml.utilization = 10
    monitor._poll()
    assert monitor.sample()["gpu_util"] == 50
    assert monitor.sample()["gpu_util"] == 50  # no round in between: the last average stays
    monitor._poll()
    assert monitor.sample()["gpu_util"] == 10


def test_sampling_does_not_wait_for_nvml(opened):
    nvml = FakeNvml(delay=0.02)  # a round of 13 calls takes 0.26 s
    monitor = opened(nvml, interval=0.0)
    start = time.perf_counter()
    for _ in range(20):
        monitor.sample()
    # 20 rounds would take 5 s; the lock is held for microseconds.
    assert time.perf_counter() - start < 1
    deadline = time.monotonic() + 20
    while "monitor 3" not in nvml.threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "monitor 3" in nvml.threads


def test_energy_and_identity(opened):
    monitor = opened(FakeNvml())
    assert monitor.joules() == 123.456
    assert monitor.identity() == {
        "driver": "580.159.04",
        "uuid": "5c57ee1534b0285a574850b4b0975c8c",
        "reserved": 600 * MIB,
    }


def test_close_ends_the_thread():
    monitor = GpuMonitor(FakeNvml(), BUS_ID, 5, 0.001)
    monitor.close()
    assert "monitor 5" not in [thread.name for thread in threading.enumerate()]


# -- opening -------------------------------------------------------------------------------------


def test_the_gpu_is_found_by_its_place_in_the_machine(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(monitor_module, "load_nvml", FakeNvml)
    monkeypatch.setattr(monitor_module, "bus_id", lambda index: asked.append(index) or BUS_ID)
    monitor = open_monitor(SimpleNamespace(kind="cuda", index=2))
    monitor.close()
    assert asked == [2]
    assert monitor.sample()["id"] == 2

    monkeypatch.setattr(monitor_module, "bus_id", lambda index: "0000:20:00.0")
    assert open_monitor(SimpleNamespace(kind="cuda", index=0)) is None
    assert capsys.readouterr().err == ("warning: no readings of GPU 0 at 0000:20:00.0: Not Found\n")


def test_without_nvml_there_is_one_warning(monkeypatch, capsys):
    def fail():
        raise FakeError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    load_nvml.cache_clear()
    try:
        for index in range(2):
            assert open_monitor(SimpleNamespace(kind="cuda", index=index)) is None
    finally:
        load_nvml.cache_clear()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "NVML Shared Library Not Found" in warning
    assert "nvidia-ml-py" in warning


def test_the_cpu_has_no_monitor():
    assert open_monitor(SimpleNamespace(kind="host")) is None


# -- [System] ------------------------------------------------------------------------------------


def test_system(opened):
    record = system_record(3, INFO, opened(FakeNvml()))
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
        raise FakeError("cudaErrorMemoryAllocation")

    runtime.memGetInfo = full  # it makes the context, which needs memory
    with pytest.raises(LlmqError, match=r"GPU 0 cannot be opened \(cudaErrorMemoryAllocation\)"):
        gpu_info(0)


def test_libraries_that_do_not_load_are_left_out(monkeypatch):
    def missing():
        raise RuntimeError("no driver")

    monkeypatch.setattr(gpu_info_module, "_LIBRARIES", {"a": missing, "b": lambda: 9190})
    assert gpu_info_module.library_versions() == {"b": "9190"}


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


def test_percent_of_a_published_run():
    # llm.q's benchmark page: 0.5B in bf16, 524288 tokens in 3493 ms: 46.9 %.
    assert round(light("Qwen2.5-0.5B").percent(524_288, 3493), 1) == 46.9


def test_more_gpus_are_faster():
    one, eight = light("Qwen2.5-0.5B"), light("Qwen2.5-0.5B", world_size=8)
    assert eight.nanoseconds == one.nanoseconds // 8


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
            ranks=SimpleNamespace(links=None, run=lambda *args: []),
            world_size=1,
        )
        announce_machine(trainer, reporter, [], None)
        return said

    unknown = "No speed of light: of NVIDIA X the peak is not known (llmq/config/cards.py)"
    assert messages("cuda", "NVIDIA X") == [unknown]
    assert messages("cuda", H100) == messages("host", "CPU") == []


class GpuLike(HostDevice):
    kind = "cuda"


def test_measured_peak_uses_the_stack_and_stays_below_its_mark(monkeypatch):
    monkeypatch.setattr(monitor_module, "PRODUCT_SIZES", (256, 32))
    monkeypatch.setattr(monitor_module, "PRODUCT_SECONDS", 1e-4)
    sizes = {n: 3 * 2 * n * n for n in (256, 32)}
    for stack, used in ((sizes[256] + 256, sizes[256]), (sizes[256], sizes[32])):
        dev = GpuLike(MemorySizes(device=0, stack=stack, pinned=0), poison=True)
        assert measured_peak(dev) > 0
        assert dev.stack.high_water_mark == used < stack
    small = GpuLike(MemorySizes(device=0, stack=sizes[32], pinned=0))
    assert measured_peak(small) is None
    assert measured_peak(HostDevice(MemorySizes(device=0, stack=MIB, pinned=0))) is None
