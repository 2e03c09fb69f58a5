"""Every kernel compiles for every architecture, keeps its values in registers, and can launch."""

import functools
import re
from dataclasses import replace

import pytest

from llmq.base.errors import LlmqError
from llmq.ops.common import CAPABILITY
from llmq.runtime.compile import KERNEL_DIR, Resources, headers, included_texts, program, target
from llmq.runtime.device import FUSED
from llmq.runtime.kernel import KernelSource
from tests.covering import covering
from tools.compile_all import (
    ARCHITECTURES,
    REGISTERS,
    Launch,
    Launches,
    Report,
    Run,
    Work,
    all_runs,
    declared_kernels,
    entries,
    launches_of,
    reports,
    work_of,
)


def nvrtc_problem() -> str | None:
    try:
        target(90)
    except LlmqError as error:
        return str(error)
    return None


def columns(run: Run) -> dict[str, object]:
    """The run's preset, and each of its fields."""
    return {"preset": run.preset, "sampled": run.sampled} | dict(run.fields)


@functools.cache
def launches() -> dict[int, Launches]:
    """The launches of some runs, so that every two have met of: an architecture, a preset, the
    fields."""
    rows = (
        (capability, run, {"capability": capability} | columns(run))
        for capability in ARCHITECTURES
        for run in all_runs(capability)
    )
    by_row = {frozenset(row.items()): (capability, run) for capability, run, row in rows}
    return launches_of(by_row[frozenset(row.items())] for row in covering(map(dict, by_row)))


@functools.cache
def bounded() -> set[str]:
    """Entry points that ask for several blocks on a multiprocessor, or for less than all registers:
    the assembler has to make do with what is left, which differs between architectures."""
    bounds = r"__launch_bounds__\s*\((?:1024|(?:[^(),]|\([^()]*\))*,.*?)\)\s*(\w+)\s*\("
    files = KERNEL_DIR.rglob("*.cu")
    found = {name for path in files for name in re.findall(bounds, path.read_text(), re.DOTALL)}
    return {*found, *FUSED}


def has_room(work: Work) -> bool:
    """Whether only the threads of a block bound the kernel's registers, and these are few."""
    few = all(launch.threads <= 512 for launch in work.launches)
    return few and work.source.entry not in bounded()


def differs(work: Work) -> bool:
    """Whether its text, or that of a header, asks for the architecture."""
    text = program(work.source)
    return any("__CUDA_ARCH__" in each for each in (text, *included_texts(text, headers())))


def facts(work: Work) -> set[tuple]:
    """The kernel with its architecture, with each of its types, and with each of its constants."""
    file, entry, types, consts = work.source
    return {(file, entry, each) for each in (work.capability, *types, *consts)}


def chosen() -> list[Work]:
    """Some of that work, with all facts of the whole of it, which tools/compile_all.py compiles.

    The one with most new facts comes first, and of these the one that is launched with most threads
    and most shared memory. Kernels that have room are compiled for the oldest architecture, which
    knows the fewest instructions; if they ask for it, for the first one that knows those of
    clusters, too.
    """
    by_kernel: dict[tuple[str, str], list[Work]] = {}
    for work in work_of(launches()):
        alike = work.capability == 80 or (work.capability == CAPABILITY and differs(work))
        if alike or not has_room(work):
            by_kernel.setdefault(work.source[:2], []).append(work)
    found = []
    for same in by_kernel.values():
        missing = set().union(*map(facts, same))
        while missing:
            most = max(same, key=lambda work: (len(facts(work) & missing), max(work.launches)))
            found.append(most)
            missing -= facts(most)
    return found


@pytest.mark.skipif(nvrtc_problem() is not None, reason=str(nvrtc_problem()))
@pytest.mark.slow
def test_kernels_compile_without_spills():
    found = list(reports(chosen()))
    assert [str(report) for report in found if report.problem] == []
    # These have so much room that they have enough on other architectures, too.
    roomy = [each for each in found if has_room(Work(each.capability, each.source, {each.launch}))]
    assert roomy and all(each.resources.registers <= 128 for each in roomy)
    assert all(each.resources.registers * each.launch.threads <= REGISTERS // 2 for each in roomy)


def test_no_kernel_is_left_out():
    launched = entries(launches())
    assert launched >= {(kernel.file, kernel.entry) for kernel in declared_kernels()}
    assert {entry for _, entry in launched} >= set(FUSED)


def test_what_a_report_complains_of():
    good = Report(
        capability=89,
        source=KernelSource("a.cu", "a", (("T", "bf16"),), (("N", 4),)),
        launch=Launch(256, 90 << 10),
        resources=Resources(registers=255, shared=9 << 10, spilled=0, stack=0, serialized=False),
    )
    assert good.problem is None
    assert str(good.source) == "a T=bf16 N=4"
    tiles = KernelSource("a.cu", "attention_forward", (("T", "bf16"),), (("HEAD_DIM", 128),))
    two = replace(good, source=tiles)
    assert "512 threads need 131072 registers" in two.problem
    two = replace(two, launch=Launch(128, 40 << 10))
    assert two.problem is None
    assert "needs 103424 bytes of" in replace(two, launch=Launch(128, 41 << 10)).problem
    for part, change, message in (
        ("resources", {"spilled": 8}, "spills 8 bytes"),
        ("resources", {"serialized": True}, "waits for each product"),
        ("resources", {"shared": (9 << 10) + 1}, "bytes of shared memory of 101376"),
        ("launch", {"threads": 288}, "288 threads need 73728 registers, there are 65536"),
    ):
        old = getattr(good, part)
        new = old._replace(**change) if part == "launch" else replace(old, **change)
        assert message in replace(good, **{part: new}).problem
