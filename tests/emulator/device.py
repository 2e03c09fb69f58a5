"""A device that compiles the CUDA kernels with g++ and runs them on the CPU.

One fiber per CUDA thread (cuda_emulator.cpp). Same launchers, same kernel files; only cu/ptx.cuh is
replaced by tests/emulator/ptx.cuh. Entries of libraries (no `.cu` file) call their references.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmq.base.dtypes import DTYPES, DType
from llmq.base.files import write_shared
from llmq.base.tensor import Tensor
from llmq.runtime import compile
from llmq.runtime.cost import MOVES, Cost
from llmq.runtime.cuda_kernels import MAP_BYTES, Arguments
from llmq.runtime.declaration import Arg
from llmq.runtime.device import MemorySizes
from llmq.runtime.host_device import HostDevice
from llmq.runtime.kernel import Kernel
from tests.emulator.guard import guarded

HERE = Path(__file__).resolve().parent
HEADER, PTX = "cuda_emulator.h", "ptx.h"
RUNTIME = ("cuda_emulator.cpp", "ptx.cpp")  # compiled once for all kernels
FLAGS = (
    *("-Og", "-std=c++20", "-fPIC", "-w", "-fvisibility=hidden"),
    "-fno-strict-aliasing",  # kernels reinterpret vectors
    "-ffp-contract=off",  # as -fmad=false: a fused multiply-add only where fmaf is written
)
# A parameter may have these types in C for a declared element type; "struct" (vectors, StepScalars)
# for all.
C_TYPES = {
    **{
        "f64": "float64",
        "f32": "float32",
        "bf16": "bfloat16",
        "e4m3": "struct8",
        "e4m3_half": "struct8",
        "e5m2": "struct8",
    },
    **{"i32": "int32", "u32": "int32", "i64": "int64", "i8": "int8", "u8": "int8"},
}
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB of one block

_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([\w:<>\s]+?)\s*(\w+)\s*\[\s*\]\s*;"
)
_ATTRIBUTE = re.compile(r"__\w+__\s*\([^()]*\)")
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(\w+)\s*\(')
_CLUSTER = re.compile(r"__cluster_dims__\s*\(\s*(\w+)")

_launches = itertools.count()
_stacks = (ctypes.c_size_t * 2)()  # Stacks of cuda_emulator.h
_lock = threading.Lock()  # a compiled kernel file keeps its launch in static variables


def missing() -> str | None:
    """Why kernels cannot be emulated here; None if they can."""
    if shutil.which("g++") is None:
        return "the emulator needs g++"
    if not compile.cuda_include_dirs():
        return "the emulator needs CUDA's headers (nvidia-cuda-runtime-cu12)"
    return None


def adapt(text: str) -> str:
    """CUDA C that g++ does not take, rewritten line by line."""
    text = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic_shared);", text)
    return re.sub(r"static\s+__shared__", "__shared__", text)


def program(
    file: str, entry: str, types: dict[str, DType], consts: dict[str, int] | None, capability: int
) -> str:
    """The C++ program of one kernel file."""
    text = adapt(compile.kernel_text(file, entry))
    entries = _ENTRY.findall(_ATTRIBUTE.sub("", text))
    lines = [
        f'#include "{HEADER}"',
        f"#define __CUDA_ARCH__ {capability * 10}",
        "namespace {",  # internal linkage, for the section that holds __shared__ variables
        '#include "common.cuh"',
        *compile.definitions(file, {v: t.name for v, t in types.items()}, consts or {}),
        f'#line 1 "{file}"',
        text,
        "}",
        *(f"EMULATOR_ENTRY({entry})" for entry in entries),
    ]
    return "\n".join(lines)


def headers() -> dict[str, str]:
    """Every header a kernel may include, by name."""
    found = {name: adapt(text) for name, text in compile.headers().items()}
    found.update({p.name: p.read_text() for p in sorted(HERE.glob("*.cuh"))})
    found.update({name: (HERE / name).read_text() for name in (HEADER, PTX)})
    return found


def _run(command: list[str], folder: str | Path, name: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} does not compile for the emulator:\n{done.stderr[:4000]}")


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout


def _command() -> list[str]:
    includes = [HERE / "stub", compile.cuda_include_dirs()[0]]
    linker = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []  # takes half the time
    return ["g++", *FLAGS, *linker, *(f"-I{folder}" for folder in includes)]


@functools.cache
def _ahead() -> Path:
    """A folder with what all programs share, compiled: the header (NVIDIA's and the standard
    library's take most of the time of a small kernel) and the emulator itself."""
    texts = {name: (HERE / name).read_text() for name in (HEADER, PTX, *RUNTIME)}
    includes = compile.cuda_include_dirs()[0]
    used = [(includes / name).read_text() for name in ("cuda_bf16.h", "cuda_fp8.h")]
    key = compile.digest([*texts.values(), *used, *FLAGS, _compiler()])
    folder = compile.cache_dir() / f"emulator-{key}"
    objects = [f"{Path(name).stem}.o" for name in RUNTIME]
    if not all((folder / name).exists() for name in objects):
        with tempfile.TemporaryDirectory() as work:
            for name, text in texts.items():
                (Path(work) / name).write_text(text)
                write_shared(folder / name, text.encode())
            commands = {o: ["-O2", "-c", name] for o, name in zip(objects, RUNTIME, strict=True)}
            commands[f"{HEADER}.gch"] = ["-x", "c++-header", HEADER]
            for made, arguments in commands.items():
                _run([*_command(), *arguments, "-o", made], work, made)
                write_shared(folder / made, (Path(work) / made).read_bytes())
    return folder


def build(text: str, name: str) -> Path:
    """Compile a program to a shared library, or find it in the cache."""
    files = headers()
    used = compile.included_texts(text, files) + [(HERE / name).read_text() for name in RUNTIME]
    path = compile.cache_dir() / f"{name}-{compile.digest([text, *used, *FLAGS, _compiler()])}.so"
    if path.exists():
        return path
    del files[HEADER], files[PTX]
    with tempfile.TemporaryDirectory() as folder:
        for header, content in files.items():
            (Path(folder) / header).parent.mkdir(exist_ok=True)
            (Path(folder) / header).write_text(content)
        (Path(folder) / "main.cpp").write_text(text)
        ahead = _ahead()
        inputs = ["main.cpp", *map(str, sorted(ahead.glob("*.o")))]
        _run([*_command(), "-shared", "-I.", f"-I{ahead}", *inputs, "-o", "main.so"], folder, name)
        write_shared(path, (Path(folder) / "main.so").read_bytes())
    return path


@functools.cache
def load(
    file: str, entry: str, types: tuple, consts: tuple, capability: int
) -> tuple[ctypes.CDLL, str]:
    """The compiled library of a kernel file, and its source."""
    text = program(file, entry, dict(types), dict(consts), capability)
    return ctypes.CDLL(str(build(text, Path(file).stem))), text


def _fits(arg: Arg, types: dict[str, DType], parameter: str) -> bool:
    """Whether a C parameter, as describe() words it, is what the kernel declares."""
    if arg.box_rows:
        return parameter == f"struct{8 * MAP_BYTES}"
    const, star = parameter.startswith("const "), parameter.endswith("*")
    element = parameter.removeprefix("const ").removesuffix("*")
    type_ = types[arg.type].name if arg.type in types else arg.type
    expected = C_TYPES.get(type_)
    if not arg.pointer:
        return not star and element == expected
    if not star or const == arg.writes:
        return False
    return (
        element.startswith("struct")
        or expected in (None, element)
        or (element.startswith("int") and int(element[3:]) == 8 * DTYPES[type_].itemsize)
    )


def _encode_map(tensor: Tensor, box_rows: int) -> bytes:
    """TensorMap of emulator/ptx.cuh."""
    return struct.pack("<5q", tensor.ptr, *tensor.shape, tensor.dtype.itemsize, box_rows)


class EmulatorDevice(HostDevice):
    """Runs every `.cu` kernel on the CPU; memory reads as NaN until something wrote it. In every
    other launch the pages before, else those behind, the tensors may not be touched.

    capability: the GPU that the kernels are compiled for. num_sms: small, so that grids that
    depend on it loop.
    """

    def __init__(self, sizes: MemorySizes, *, capability: int = 90, num_sms: int = 2, **kwargs):
        super().__init__(sizes, poison=True, **kwargs)
        self.spec = replace(
            self.spec, name=f"emulated sm_{capability}", capability=capability, num_sms=num_sms
        )

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: tuple,
        *,
        consts: dict[str, int] | None = None,
        smem: int = 0,
        cost: Cost = MOVES,
    ) -> None:
        if not kernel.file.endswith(".cu"):
            super().launch(kernel, grid, block, args, consts=consts, smem=smem, cost=cost)
            return
        types = kernel.bind(args)
        geometry = self._geometry(kernel, grid, block, smem)
        items = (tuple(sorted(d.items())) for d in (types, consts or {}))
        library, text = load(kernel.file, kernel.entry, *items, self.spec.capability)
        self._check_parameters(kernel, types, library)
        cluster = _CLUSTER.search(text[: text.index(f"{kernel.entry}(")][-300:])
        arguments = Arguments(kernel, _encode_map)
        size = cluster.group(1) if cluster else "1"  # a number or the name of a constant
        numbers = (ctypes.c_uint * 7)(*geometry, int((consts or {}).get(size, size)))
        run = getattr(library, f"launch_{kernel.entry}")
        run.restype = ctypes.c_char_p
        with guarded(args, front=next(_launches) % 2 == 0) as inside, _lock:
            arguments.set(inside)
            address = ctypes.c_void_p(arguments.address)
            problem = run(numbers, ctypes.c_size_t(smem), address, _stacks)
        if problem:
            raise RuntimeError(f"{kernel.entry}: {problem.decode()}")

    def _geometry(self, kernel: Kernel, grid: object, block: object, smem: int) -> list[int]:
        """Grid and block as six numbers; raises what a GPU would refuse."""
        sizes = [(*((n,) if isinstance(n, int) else n), 1, 1)[:3] for n in (grid, block)]
        limit = SHARED_LIMIT[self.spec.capability] * 1024
        if min(*sizes[0], *sizes[1]) < 1 or np.prod(sizes[1]) > 1024 or max(sizes[0][1:]) > 65535:
            raise ValueError(
                f"{kernel.entry}: grid {sizes[0]}, block {sizes[1]} cannot be launched"
            )
        if smem > limit:
            raise ValueError(f"{kernel.entry}: {smem} bytes of shared memory, the GPU has {limit}")
        return [*sizes[0], *sizes[1]]

    def _check_parameters(
        self, kernel: Kernel, types: dict[str, DType], library: ctypes.CDLL
    ) -> None:
        describe = getattr(library, f"parameters_{kernel.entry}", None)
        if describe is None:
            raise RuntimeError(f'{kernel.file} has no extern "C" __global__ void {kernel.entry}')
        describe.restype = ctypes.c_char_p
        actual = describe().decode().split(", ")
        if len(actual) != len(kernel.declared) or not all(
            _fits(a, types, p) for a, p in zip(kernel.declared, actual, strict=True)
        ):
            raise TypeError(
                f"{kernel.entry}: declared ({kernel.args}), "
                f"but {kernel.file} takes ({', '.join(actual)})"
            )
