"""Measure what loading and launching CUDA C kernels costs the host, by three ways of doing it, on
GPU 0.

    PYTHONPATH=. python tools/launch_cost.py [--model Qwen2.5-0.5B] [--launches 500]

Prints, for each way in a process of its own: seconds to import what it needs, to open the GPU and
to load all kernels of a training step, from machine code that lies in the cache; microseconds of
a launch with seven arguments, outside of graphs and while one is captured, and of the graph's
replay. The ways are cuLaunchKernel on what RawModule has loaded (as llmq does), a call of CuPy's
RawKernel, and the functions of cupy_backends, which CuPy does not document.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

ROUNDS = 20  # of timed launches, of which the median counts
BYTES = 1 << 16  # of the memory that the launched kernel reads and writes
THREADS = 1024  # as column_sum wants

Loader = Callable[[str, str], Any]  # path of the machine code, entry point -> what is launched


def noted_kernels(model: str) -> dict[str, Any]:
    """Path and entry point of all kernels of a step, and of the one that is launched; compiles."""
    from llmq.options.options import TrainConfig
    from llmq.options.presets import preset
    from llmq.plan.plan import make_plan
    from llmq.runtime.compile import compile_kernel
    from llmq.runtime.cuda_api import device_spec

    spec = device_spec(0)
    config = TrainConfig(model=model, from_scratch=True, batch_size=4).normalized()
    sources = sorted(make_plan(config, preset(model), spec).sources)
    kernels, launched = [], None
    for source in sources:
        kernels.append((str(compile_kernel(source, spec.capability).path), source.entry))
        if source.entry == "column_sum":
            launched = kernels[-1]
    return {"kernels": kernels, "launched": launched}


def packed(launch: Callable[..., Any], function: Any, address: int) -> Callable[[int], None]:
    """A launch on a stream, with arguments as llmq packs them."""
    from llmq.ops.common import COLUMN_SUM
    from llmq.runtime.cuda_kernels import Arguments

    arguments = Arguments(COLUMN_SUM)

    def run(stream: int) -> None:
        arguments.set((address, address, address, 1, 1, 0, 0))
        launch(function, 1, 1, 1, THREADS, 1, 1, 0, stream, arguments.address, 0)

    return run


def driver_way() -> tuple[Any, Loader, Callable[[Any, int], Callable[[int], None]]]:
    """RawModule, and the driver's launch."""
    from llmq.runtime import cuda_api

    api = cuda_api.load()

    def load(path: str, entry: str) -> Any:
        raw = api.RawModule(path=path).get_function(entry)
        return raw, api.driver.CUfunction(raw.kernel.ptr)

    return api.runtime, load, lambda f, at: packed(api.driver.cuLaunchKernel, f[1], at)


def raw_way() -> tuple[Any, Loader, Callable[[Any, int], Callable[[int], None]]]:
    """RawModule, and CuPy's own launch."""
    import cupy
    import numpy as np
    from cupy.cuda import ExternalStream, runtime

    def launching(raw: Any, address: int) -> Callable[[int], None]:
        streams: dict[int, Any] = {}

        def run(stream: int) -> None:
            if stream not in streams:
                streams[stream] = ExternalStream(stream)
            pointer, one, zero = np.uint64(address), np.int32(1), np.int32(0)
            args = (pointer, pointer, pointer, one, one, zero, np.uint32(0))
            raw((1,), (THREADS,), args, stream=streams[stream])

        return run

    return runtime, lambda path, entry: cupy.RawModule(path=path).get_function(entry), launching


def backends_way() -> tuple[Any, Loader, Callable[[Any, int], Callable[[int], None]]]:
    """The undocumented functions."""
    from cupy_backends.cuda.api import driver, runtime

    modules: dict[str, int] = {}

    def load(path: str, entry: str) -> int:
        if path not in modules:
            modules[path] = driver.moduleLoadData(Path(path).read_bytes())
        return driver.moduleGetFunction(modules[path], entry)

    return runtime, load, lambda function, at: packed(driver.launchKernel, function, at)


WAYS = {
    "RawModule, cuLaunchKernel": driver_way,
    "RawModule, RawKernel's call": raw_way,
    "cupy_backends": backends_way,
}


def measure(way: str, work: dict[str, Any], launches: int) -> dict[str, float]:
    """All numbers of one way, in a process that has used no CUDA so far."""
    times = [time.perf_counter()]
    runtime, load, launching = WAYS[way]()
    times.append(time.perf_counter())
    runtime.setDevice(0)
    address = runtime.malloc(BYTES)
    runtime.memset(address, 0, BYTES)
    stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
    runtime.deviceSynchronize()
    times.append(time.perf_counter())
    loaded = [load(path, entry) for path, entry in work["kernels"]]
    times.append(time.perf_counter())
    names = ("import s", "open s", "load s")
    result = {n: b - a for n, a, b in zip(names, times[:-1], times[1:], strict=True)}
    assert all(loaded)
    run = launching(load(*work["launched"]), address)

    def microseconds(action: Callable[[], Any]) -> float:
        rounds = []
        for _ in range(ROUNDS):
            runtime.deviceSynchronize()
            start = time.perf_counter()
            action()
            rounds.append((time.perf_counter() - start) / launches * 1e6)
        runtime.deviceSynchronize()
        return statistics.median(rounds)

    def eager() -> None:
        for _ in range(launches):
            run(stream)

    graphs: list[int] = []

    def capture() -> None:
        runtime.streamBeginCapture(stream, runtime.streamCaptureModeThreadLocal)
        eager()
        graphs.append(runtime.streamEndCapture(stream))

    def replay() -> None:
        runtime.graphLaunch(executable, stream)
        runtime.streamSynchronize(stream)

    result["eager us"], result["capture us"] = microseconds(eager), microseconds(capture)
    executable = runtime.graphInstantiate(graphs[-1])
    result["replay us"] = microseconds(replay)
    return result


def main(
    model: Annotated[str, typer.Option(help="Whose step's kernels are loaded.")] = "Qwen2.5-0.5B",
    launches: Annotated[int, typer.Option(min=1, help="Launches of a round.")] = 500,
    way: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare the ways to load and launch kernels."""
    if way is not None:
        print(json.dumps(measure(way, json.load(sys.stdin), launches)))
        return
    work = noted_kernels(model)
    print(f"{len(work['kernels'])} entry points of {len({p for p, _ in work['kernels']})} files")
    for turn in range(3):  # the first one fills the system's cache of files
        for name in WAYS:
            command = [sys.executable, __file__, "--way", name, "--launches", str(launches)]
            done = subprocess.run(
                command, input=json.dumps(work), stdout=subprocess.PIPE, text=True, check=True
            )
            result = json.loads(done.stdout)
            if turn:
                print(f"{name:28}", "  ".join(f"{k} {v:8.3f}" for k, v in result.items()))


if __name__ == "__main__":
    typer.run(main)
