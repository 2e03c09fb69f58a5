"""The live view and the lines `[G]` on simulated machines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console, Group

from llmq.report.live import Panel, Progress, Row, panel_lines, record_line, waiting_line
from llmq.run.sensors import Sensor, Sensors, row_of
from llmq.runtime.nvml import find_gpu
from tests.fake_nvml import GIB, FakeGpu, FakeNvml

LONG = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


def rig():
    """Eight cards with what cards have: heat, power limits, sensors that are missing, a loss."""
    gpus = [FakeGpu(number) for number in range(8)]
    gpus[1].reasons, gpus[1].clock = 0, 1980
    gpus[2].reasons, gpus[2].temperature, gpus[2].clock = 0x40 | 0x8, 104, 345
    gpus[3].name, gpus[3].rx, gpus[3].tx = LONG, 121_000_000, 0
    gpus[4].lost = True
    gpus[5].broken = {
        *("UtilizationRates", "PcieThroughput", "MemoryInfo", "CurrentClocksThrottleReasons"),
        *("EnforcedPowerLimit", "TemperatureThreshold"),
    }
    gpus[6].reasons, gpus[6].use, gpus[6].clock = 0x1, 0, 210
    gpus[7].total, gpus[7].power, gpus[7].power_limit = 144 * GIB, 1_000_000, 1_000_000
    return FakeNvml(*gpus)


@pytest.fixture
def eight():
    """Rows of that rig, on which all wait for GPU 3."""
    nvml = rig()
    gpus = [find_gpu(nvml, gpu.bus_id) for gpu in nvml.gpus]
    sensors = Sensors([Sensor(gpu, f"GPU {i}", i) for i, gpu in enumerate(gpus)], None)
    sensors._round()
    waits = [0.031, 0.031, 0.12, 0.004, 0.031, 0.031, 0.031, 0.031]
    return [row_of(s, i, waits[i]) for i, s in enumerate(sensors.sensors)]


def drawn(what, width, encoding="utf-8"):
    buffer = io.TextIOWrapper(io.BytesIO(), encoding)
    Console(file=buffer, width=width).print(what)
    buffer.seek(0)
    return [line.rstrip() for line in buffer.read().splitlines()]


def golden(width):
    return (Path(__file__).parent / "golden" / f"gpus_{width}.txt").read_text().splitlines()


@pytest.mark.parametrize(("width", "like"), [(80, 80), (113, 80), (120, 120)])
def test_eight_gpus(eight, width, like):
    assert drawn(Panel(lambda: eight), width) == golden(like)


@pytest.mark.parametrize("width", [80, 120])
def test_a_whole_view_of_eight_gpus_has_sixteen_lines_at_most(eight, width):
    progress = Progress(0, 100_000)
    for step in range(200):
        progress.update(step=step, loss=5.0 + step, norm=0.5, lr=1e-3, ms=500.0, tokens=1 << 19)
    progress.update(scores={"eval": 2.71, "wiki/loss": 3.14}, validated=0.5)
    lines = drawn(Group(progress.render(), Panel(lambda: eight)), width)
    assert len(lines) <= 16
    assert max(map(len, lines)) <= width


def test_a_narrow_terminal_gets_whole_lines_that_are_cut(eight):
    full = golden(80)
    assert drawn(Panel(lambda: eight), 60)[:-1] == [line[:60].rstrip() for line in full[:-1]]


def test_a_terminal_without_utf8(eight):
    lines = drawn(Panel(lambda: eight), 80, "ascii")
    assert all(line.isascii() for line in lines)
    assert lines[1].startswith("  0 #########  98% 70.0/80.0")
    assert len(lines[0]) == len(golden(80)[0])


def test_a_single_gpu_waits_for_nobody():
    nvml = FakeNvml(FakeGpu())
    sensor = Sensor(find_gpu(nvml, nvml.gpus[0].bus_id), "GPU 0", 0)
    assert drawn(Panel(lambda: [row_of(sensor, 0)]), 80)[1:] == ["  0 no readings"]
    sensor.poll(Sensors([]).news)
    heading, row = drawn(Panel(lambda: [row_of(sensor, 0)]), 80)
    assert heading.endswith("PCI↑") and row.endswith("7.0M")
    sensor.at -= 30
    assert drawn(Panel(lambda: [row_of(sensor, 0)]), 80)[1:] == ["  0 no reading for 30 s"]


def test_cpus_instead():
    sample = {"cpus": 16, "util": 50, "memory_used": 6 * GIB, "memory_total": 32 * GIB}
    rows = [Row(label="CPU", sample=sample), Row(label="CPU", sample={}, machine="node-2")]
    assert drawn(Panel(lambda: rows), 80) == [
        "CPU ████▌      50% of 16 cores  memory 6.0/32.0 GiB",
        "CPU node-2              - memory - GiB",
    ]


@pytest.mark.parametrize(
    ("waits", "text"),
    [
        ([None, None], ""),
        ([0.1], ""),
        ([0.1, 0.1], "exposed communication 10.0% of a step; no GPU keeps the others waiting"),
        ([0.1, 0.3, 0.05], "exposed communication 15.0% of a step; the others wait for GPU 2, "),
    ],
)
def test_who_waits_for_whom(waits, text):
    rows = [Row(label=str(i), sample={}, waits=share) for i, share in enumerate(waits)]
    found = waiting_line(rows)
    assert found.startswith(text) and bool(found) == bool(text)


def test_reasons_of_a_record_are_shown_as_those_of_a_sample():
    """`top` has no other readings of GPUs of another machine."""
    sample = {"throttle": "thermal cap", "reasons": {"severe heat": 93, "power limit": 7}}
    for record, shown in ((sample, "heat!"), ({"throttle": "no cap", "reasons": {}}, "")):
        heading, line = (line.plain for line in panel_lines([Row(label="0", sample=record)], 80))
        place = heading.index("held by")
        assert line[place : place + 7].strip() == shown


def test_line_of_a_record():
    nvml = rig()
    gpus = [find_gpu(nvml, nvml.gpus[i].bus_id) for i in (0, 4, 5)]
    sensors = Sensors([Sensor(gpu, "GPU", 0) for gpu in gpus], None)
    sensors._round()
    nvml.gpus[0].temperature, nvml.gpus[0].reasons, nvml.gpus[0].rx = 81, 0x20, 12_000_000
    sensors._round()
    first, lost, mute = sensors.take()
    assert record_line(first | {"communication": 12.34}) == (
        "use 98^98% | mem 70.0^70.0/80.0 GiB | power 651^651/700 W | temp 71^81/89°C | "
        "clock 1755^1755 MHz | held by power limit 50%, heat 50% | "
        "PCI↓ 8.5G^12.0G PCI↑ 7.0M^7.0M B/s | waits 12.3 ms"
    )
    assert record_line(lost) == (
        "use -^-% | mem - | power -^-/- W | temp -^-/-°C | clock -^- MHz | held by not told | "
        "PCI↓ -^- PCI↑ -^- B/s"
    )
    assert record_line(mute).startswith("use -^-% | mem - | power 651^651/- W | temp 61^61/-°C")
    cpus = {"util": 40, "util_max": 70, "memory_used": GIB, "memory_used_max": 2 * GIB}
    assert record_line(cpus | {"memory_total": 8 * GIB}) == "use 40^70% | mem 1.0^2.0/8.0 GiB"
