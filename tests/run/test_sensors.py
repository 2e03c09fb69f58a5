"""Sensors of simulated machines: what is read, by whom, and what becomes of it."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from llmq.base.callback import RunEnd
from llmq.base.errors import LlmqError
from llmq.base.result import Result
from llmq.run.sensors import Sensing, Sensor, Sensors, Waits, Window, open_sensors
from llmq.runtime.host_usage import HostUsage
from llmq.runtime.nvml import NvmlGpu, all_gpus, find_gpu, load_nvml, reason, xid_text
from llmq.runtime.world import World
from tests.conftest import gpu_problem
from tests.fake_nvml import FAKE_UUID, GIB, MIB, FakeError, FakeGpu, FakeNvml, fake_sensors


@pytest.fixture
def watched():
    """Makes Sensors of a FakeNvml, which read when the test says so unless it gives an interval."""
    opened = []

    def make(nvml, interval=3600.0):
        gpus = [find_gpu(nvml, gpu.bus_id) for gpu in nvml.gpus]
        sensors = [Sensor(gpu, f"GPU {rank}", rank) for rank, gpu in enumerate(gpus)]
        opened.append(Sensors(sensors, interval))
        return opened[-1]

    yield make
    for sensors in opened:
        sensors.close()


def test_record_has_llm_qs_fields_and_more(watched):
    (record,) = watched(FakeNvml(FakeGpu())).take()
    assert record == {
        "id": 0,
        "clock": 1755,
        "clock_max": 1755,
        "max_clock": 1980,
        "fan": 30,
        "power": 651_234,
        "power_max": 651_234,
        "power_limit": 700_000,
        "temperature": 61,
        "temperature_max": 61,
        "temp_slowdown": 89,
        "gpu_util": 98,
        "gpu_util_max": 98,
        "mem_util": 40,
        "mem_util_max": 40,
        "throttle": "power cap",
        "throttled": 100,
        "reasons": {"power limit": 100},
        "dram_free": 10 * GIB,
        "dram_free_min": 10 * GIB,
        "dram_total": 80 * GIB,
        "pcie_rx": 5_000_000_000,
        "pcie_rx_max": 5_000_000_000,
        "pcie_tx": 7_000_000,
        "pcie_tx_max": 7_000_000,
        "ecc_corrected": 3,
        "ecc_uncorrected": 0,
        "xid": [],
        "samples": 1,
    }


def test_what_the_card_does_not_tell(watched):
    refused = {
        "FanSpeed",
        "UtilizationRates",
        "PcieThroughput",
        "TemperatureThreshold",
        "CurrentClocksThrottleReasons",
        "TotalEnergyConsumption",
        "UUID",
        "MemoryInfo",
        "TotalEccErrors",
        "Name",
    }
    sensors = watched(FakeNvml(FakeGpu(broken=refused)))
    (record,) = sensors.take()
    missing = {name.removesuffix("_max") for name, value in record.items() if value == -1}
    assert missing == {
        *("fan", "gpu_util", "mem_util", "pcie_rx", "pcie_tx", "temp_slowdown", "throttled"),
        *("dram_free", "dram_free_min", "dram_total", "ecc_corrected", "ecc_uncorrected"),
    }
    assert (record["throttle"], record["reasons"]) == ("not supported", {})
    assert record["power"] == 651_234
    (gpu,) = sensors.sources
    assert (gpu.joules(), gpu.name) == (None, "")
    assert gpu.identity() == {"driver": "580.159.04", "uuid": "", "reserved": 0}


@pytest.mark.parametrize(
    ("bits", "kind", "text"),
    [
        (0x1, "idle", "idle"),
        (0x4, "power cap", "power limit"),
        (0x80 | 0x8, "power cap", "power brake"),
        (0x20, "thermal cap", "heat"),
        (0x40 | 0x8, "thermal cap", "severe heat"),
        (0x8, "other cap", "slowdown"),
        (0x10, "other cap", "sync boost"),
        (0x2, "other cap", "set clocks"),
        (0x100, "other cap", "set clocks"),
        (0x200, "other cap", "board limit"),
        (0x10000, "other cap", "other"),
    ],
)
def test_what_holds_the_clock_down(bits, kind, text):
    found = reason(bits)
    assert (found.kind, found.text) == (kind, text)
    assert len(found.short) <= 7
    assert reason(0) is None


def test_a_record_has_means_and_maxima_since_the_last(watched):
    nvml = FakeNvml(FakeGpu(reasons=0))
    sensors, gpu = watched(nvml), nvml.gpus[0]
    for use, free, reasons in ((10, 4, 0x4), (30, 6, 0x4), (21, 5, 0x20)):
        gpu.use, gpu.free, gpu.reasons = use, free, reasons
        sensors._round()
    (first,) = sensors.take()
    assert (first["gpu_util"], first["gpu_util_max"]) == (40, 98)  # with the first one's 98
    assert first["dram_free_min"] == 4
    assert (first["throttle"], first["throttled"]) == ("power cap", 75)
    assert first["reasons"] == {"power limit": 50, "heat": 25}
    assert sensors.take() == [first], "no sample in between: the last record stays"
    gpu.use = 50
    sensors._round()
    (second,) = sensors.take()
    assert (second["gpu_util"], second["gpu_util_max"], second["samples"]) == (50, 50, 1)


def test_samples_that_are_missing_do_not_count():
    window = Window()
    for power in (100, -1, 201):
        record = window.add({"power": power, "fan": -1})
    assert (record["power"], record["power_max"], record["fan"]) == (150, 201, -1)


def test_a_driver_that_hangs_holds_nobody_up(watched, monkeypatch):
    nvml, hangs, free = FakeNvml(), threading.Event(), threading.Event()
    sensors = watched(nvml, interval=0.01)
    answers = []
    monkeypatch.setattr(
        FakeNvml, "_ClockInfo", lambda *_: hangs.set() or answers.append(free.wait(20)) or 0
    )
    assert hangs.wait(20)
    sensors.close(0.05)
    assert answers == [], "it did not wait for the driver"
    assert nvml.listening == 1, "nothing is taken from a thread that uses it"
    free.set()


def test_the_thread_ends_and_listens_no_more(watched):
    nvml = FakeNvml(FakeGpu(0), FakeGpu(1))
    sensors = watched(nvml, interval=0.001)
    sensors.close()
    assert nvml.listening == 0
    assert "sensors" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("count", [1, 8])
def test_one_thread_reads_all_gpus(count, watched):
    nvml = FakeNvml(*(FakeGpu(i, power=1000 * i) for i in range(count)))
    before = threading.active_count()
    sensors = watched(nvml)
    assert threading.active_count() == before + 1
    found = [(record["id"], record["power"]) for record in sensors.take()]
    assert found == [(i, 1000 * i) for i in range(count)]


# -- errors --------------------------------------------------------------------------------------


def test_errors_are_news_once(watched):
    nvml = FakeNvml(FakeGpu(0, uncorrected=5), FakeGpu(1))
    sensors = watched(nvml)
    assert sensors.take_news() == [], "what was before the run is not its business"
    nvml.gpus[0].uncorrected, nvml.gpus[1].xids = 7, [31, 79]
    sensors._round()
    lines = [
        "GPU 0: 2 uncorrectable memory errors (ECC)",
        "GPU 1: Xid 31, a kernel used memory that it may not",
        "GPU 1: Xid 79, the GPU has fallen off the bus",
    ]
    assert sensors.take_news() == lines
    nvml.gpus[0].xids = [1234]
    sensors._round()
    assert sensors.take_news() == ["GPU 0: Xid 1234"]
    assert sensors.last_words() == [*lines, "GPU 0: Xid 1234"]
    first, second = sensors.take()
    assert (first["xid"], first["ecc_uncorrected"], second["xid"]) == ([1234], 7, [31, 79])
    sensors._round()
    assert sensors.take()[1]["xid"] == []
    assert xid_text(48) == "Xid 48, an uncorrectable memory error (ECC)"


def test_last_words_are_of_this_moment(watched):
    nvml = FakeNvml()
    sensors = watched(nvml)
    nvml.gpus[0].xids.append(13)
    assert sensors.last_words() == ["GPU 0: Xid 13, a kernel failed"]


def test_a_gpu_that_vanishes(watched):
    nvml = FakeNvml(FakeGpu(0), FakeGpu(1))
    sensors = watched(nvml)
    nvml.gpus[1].lost = True
    sensors.take()
    sensors._round()
    assert sensors.take_news() == ["GPU 1 does not answer any more: GPU is lost"]
    here, gone = sensors.take()
    assert (here["power"], gone["power"], gone["throttle"]) == (651_234, -1, "not supported")
    assert sensors.sources[1].lost == "GPU is lost"
    sensors._round()
    assert sensors.take_news() == []


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self):
        self.messages, self.records = [], []

    def message(self, text, step=0):
        self.messages.append((step, text))

    def sensors(self, kind, step, rank, fields, label, line):
        self.records.append((kind, step, rank, fields, label, line))


def result(*waits):
    return Result(loss=1.0, tokens=8, norm=1.0, waits=waits)


def done(step, result, ms):
    return SimpleNamespace(step=step, result=result, ms=ms)


def device(index, rank=None, kind="cuda"):
    """The part of a device that sensors ask; its rank is its index if none is given."""
    mesh = SimpleNamespace(rank=index if rank is None else rank)
    return SimpleNamespace(kind=kind, index=index, mesh=mesh)


def test_what_a_run_reports(monkeypatch):
    nvml = fake_sensors(monkeypatch, FakeGpu(0), FakeGpu(1))
    devices = [device(i) for i in range(2)]
    notes = Notes()
    sensing = Sensing(devices, World.of(2), notes, 2)
    try:
        for step, waits in enumerate([(1.0, 9.0), (2.0, 4.0), (4.0, 8.0)]):
            if step == 1:
                nvml.gpus[1].xids.append(94)
                sensing.sensors._round()
            sensing.on_step(done(step, result(*waits), 100.0))
        waited = [
            (step, rank, fields["communication"]) for _, step, rank, fields, *_ in notes.records
        ]
        assert waited == [(0, 0, 1.0), (0, 1, 9.0), (2, 0, 3.0), (2, 1, 6.0)]
        text = "WARNING: GPU 1: Xid 94, a memory error (ECC) that was contained"
        assert notes.messages == [(1, text)]
        assert notes.records[1][4:] == ("gpu  1", notes.records[1][5])
        assert notes.records[1][5].endswith(" | waits 9.0 ms")
        rows = sensing.panel.rows()
        assert [(row.label, round(row.waits, 6)) for row in rows] == [("0", 0.023333), ("1", 0.07)]
        error, bug = LlmqError("failed"), KeyError("x")
        for each in (error, bug):
            sensing.on_end(RunEnd(steps_done=3, error=each))
        assert error.details == tuple(bug.__notes__) == (text.removeprefix("WARNING: "),)
    finally:
        sensing.on_end(RunEnd(steps_done=3, error=None))


def test_records_of_several_machines(monkeypatch):
    """Each process reads its own GPUs; the first one writes what all have found."""
    fake_sensors(monkeypatch, FakeGpu(0))
    notes = Notes()

    class Both:
        def gather(self, own):
            records, _ = own
            return [([records[0] | {"id": 7}], ["GPU 0: Xid 13"]), own]

    sensing = Sensing([device(0, rank=1)], World((1, 1), ("a", "b"), 1, Both()), notes, 1)
    try:
        sensing.on_step(done(0, result(1.0, 2.0), 10.0))
    finally:
        sensing.on_end(RunEnd(steps_done=3, error=None))
    found = [
        (rank, f["machine"], f["id"], f["communication"]) for _, _, rank, f, *_ in notes.records
    ]
    assert found == [(0, "a", 7, 1.0), (1, "b", 0, 2.0)]
    assert notes.messages == [(0, "WARNING: GPU 0: Xid 13 (machine 'a')")]


def test_processes_of_one_machine_have_one_record_of_its_cpus(monkeypatch):
    notes, devices = Notes(), [device(0, kind="host")]
    read = HostUsage.read
    monkeypatch.setattr(HostUsage, "read", lambda self: read(self) | {"util": 30})

    class Three:
        def gather(self, own):
            return [own] * 3

    sensing = Sensing(devices, World((1, 1, 1), ("a", "a", "b"), 0, Three()), notes, 1)
    try:
        sensing.on_step(done(0, result(), 10.0))
    finally:
        sensing.on_end(RunEnd(steps_done=3, error=None))
    assert [(kind, rank, label) for kind, _, rank, _, label, _ in notes.records] == [
        ("cpu", 0, "a"),
        ("cpu", 2, "b"),
    ]


def test_waits_of_one_rank_are_none():
    waits = Waits(1)
    waits.add(result(), 5.0)
    assert (waits.take(), waits.shares()) == ([None], [None])


# -- which GPU -----------------------------------------------------------------------------------


def test_gpus_are_found_by_their_place(monkeypatch, capsys):
    """CUDA_VISIBLE_DEVICES reorders them, names them by UUID and hides others."""
    nvml = fake_sensors(monkeypatch, *(FakeGpu(i, power=1000 * i) for i in range(4)))
    visible = [3, 1]
    monkeypatch.setattr("llmq.run.sensors.bus_id", lambda i: nvml.gpus[visible[i]].bus_id)
    devices = [device(i) for i in range(2)]
    sensors = open_sensors(devices)
    sensors.close()
    assert [(r["id"], r["power"]) for r in sensors.take()] == [(0, 3000), (1, 1000)]

    monkeypatch.setattr("llmq.run.sensors.bus_id", lambda i: "0000:77:00.0")
    sensors = open_sensors(devices[:1])
    assert (sensors.take(), sensors.sources, sensors.last_words()) == ([None], [None], [])
    sensors.close()
    assert capsys.readouterr().err == "warning: no readings of GPU 0 at 0000:77:00.0: Not Found\n"


def test_an_instance_of_a_divided_gpu():
    """An instance of MIG has its own memory, and power, clock and temperature of the GPU."""
    parts = {
        number: FakeGpu(
            uuid=f"MIG-0{number}57ee15-34b0-285a-5748-50b4b0975c8c",
            free=number * GIB,
            total=10 * GIB,
            broken={"PowerUsage", "ClockInfo", "Temperature", "UtilizationRates"},
        )
        for number in (1, 4)
    }
    whole = FakeGpu(2, instances=parts, broken={"UtilizationRates"})
    nvml = FakeNvml(FakeGpu(0), FakeGpu(1), whole)
    gpu = find_gpu(nvml, whole.bus_id, "0457ee1534")  # CUDA's, which may end early
    found = gpu.read()
    assert (found["dram_free"], found["dram_total"]) == (4 * GIB, 10 * GIB)
    assert (found["power"], found["clock"], found["gpu_util"]) == (651_234, 1755, -1)
    assert gpu.uuid == "0457ee1534b0285a574850b4b0975c8c"
    for unknown in ("", "77"):
        assert find_gpu(nvml, whole.bus_id, unknown).read()["dram_total"] == 80 * GIB


def test_all_gpus_of_a_machine():
    nvml = FakeNvml(FakeGpu(0), FakeGpu(1, lost=True), FakeGpu(2))
    assert [gpu and gpu.uuid[6:8] for gpu in all_gpus(nvml)] == ["00", None, "02"]


def test_energy_and_identity():
    gpu = NvmlGpu(FakeNvml(), FakeGpu())
    assert (gpu.joules(), gpu.name) == (123.456, "NVIDIA GeForce RTX 4090")
    expected = {"driver": "580.159.04", "uuid": FAKE_UUID, "reserved": 600 * MIB}
    assert gpu.identity() == expected


def test_without_nvml_there_is_one_warning(monkeypatch, capsys):
    def fail():
        raise FakeError(12, "NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    load_nvml.cache_clear()
    try:
        sensors = open_sensors([device(i) for i in range(2)])
    finally:
        load_nvml.cache_clear()
    assert sensors.take() == [None, None]
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "NVML Shared Library Not Found" in warning
    assert "nvidia-ml-py" in warning


def test_the_real_module_has_what_is_used():
    pynvml = pytest.importorskip("pynvml")
    for name in dir(FakeNvml):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(pynvml, name), name
    for name in vars(FakeNvml):
        if name[:1] == "_" and name[1:2].isupper():
            assert hasattr(pynvml, f"nvmlDeviceGet{name[1:]}"), name
    constants = (n for n in vars(FakeNvml) if n.startswith("NVML_ERROR") or "VOLATILE" in n)
    assert all(getattr(pynvml, n) == getattr(FakeNvml, n) for n in constants)


# -- CPUs ----------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of a CPU, as psutil tells them under Linux: guest is a part of user."""

    user: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    guest: float = 0.0


def test_use_of_the_cpus_since_the_last_time(monkeypatch):
    told = [[Times(10, 90, 0, 5), Times(), Times(0, 100)]] * 2
    told.append([Times(70, 90, 40, 9), Times(500), Times(0, 200)])
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: told.pop(0))
    monkeypatch.setattr("llmq.runtime.host_usage.allowed_cpus", lambda: {0, 2})
    monkeypatch.setattr("llmq.runtime.host_usage.host_memory", lambda: (3, 10))
    usage = HostUsage()
    assert usage.read() == {"cpus": 2, "util": -1, "memory_used": 7, "memory_total": 10}
    assert usage.read()["util"] == 30

    def hidden(percpu):
        raise PermissionError("/proc/stat")

    monkeypatch.setattr("psutil.cpu_times", hidden)
    assert HostUsage().read()["util"] == -1


# -- a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_thread_reads_while_a_gpu_works_and_adds_no_waits():
    if problem := gpu_problem():
        pytest.skip(problem)
    from llmq.bench.measure import open_trainer, random_batches
    from tools.profile_step import host_work

    options = {"model": "tiny", "from-scratch": True, "batch-size": 2, "seq-len": 64, "gpus": 1}
    waits = []
    with open_trainer(options, 100) as trainer:
        batches = random_batches(trainer)
        for interval in (None, 0.01):  # a hundred times as often as a run does
            sensors = open_sensors(trainer.ranks.devices, interval)
            for _ in range(3):
                trainer.step(batches)
            waits.append(host_work(trainer, batches)[1])
            end = time.monotonic() + 5  # NVML's first answer may take longer than these steps
            while interval and time.monotonic() < end:
                trainer.step(batches)
                if sensors.sensors[0].summary["samples"] > 1:
                    break
            (record,) = sensors.take()
            sensors.close()
    assert waits == [0, 0]
    assert record["samples"] > 1
    assert 0 < record["temperature"] < record["temp_slowdown"]
    assert 0 < record["dram_free"] < record["dram_total"]
    assert record["throttle"] != "not supported"
