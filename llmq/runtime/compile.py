"""Compilation of kernels to machine code by NVRTC, with a cache on disk.

NVRTC needs neither a GPU nor a driver: any machine compiles kernels for any GPU. The environment
variable LLMQ_CACHE_DIR names the folder of compiled kernels; LLMQ_LINEINFO=1 adds source lines for
profilers and sanitizers.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import read_own, write_shared
from llmq.runtime.cuda_libraries import load_libraries
from llmq.runtime.kernel import TYPE_VARIABLES, KernelSource

KERNEL_DIR = Path(__file__).resolve().parent.parent / "cu"
DEFAULT_TYPE = "f32"  # dtype of type variables that the compiled entry point does not use
FLAGS = ("-std=c++17", "-fmad=false", "--ptxas-options=-v")

_locks: dict[Path, threading.Lock] = {}

_ENTRY = re.compile(
    r'extern\s+"C"\s+(?=__global__\s+void\s+(?:__\w+__\s*\((?:[^()]|\([^()]*\))*\)\s*)*(\w+)\s*\()'
)
_SERIALIZED = r"wgmma\.mma_async instructions are serialized .*in (the )?function "
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of a kernel on a multiprocessor, as the assembler reports them. registers:
    number of registers of one thread. shared: bytes of static shared memory of a thread block.
    spilled, stack: bytes per thread in local memory, which is slow. serialized: True if the
    assembler makes a warpgroup wait after each matrix product, because the assembler could not tell
    when the product's registers are free."""

    registers: int
    shared: int
    spilled: int
    stack: int
    serialized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """The machine code (cubin) of one kernel for one set of definitions. path: path of the cubin
    file."""

    path: Path
    code: bytes
    resources: Resources


def cache_dir() -> Path:
    """Return the folder of compiled kernels: LLMQ_CACHE_DIR if set, else llmq/ in the user's cache
    folder. Raises ConfigError if the user has no home directory, as in some containers."""
    if chosen := os.environ.get("LLMQ_CACHE_DIR"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmq"
    except RuntimeError:
        raise ConfigError("no home directory for the cache: set LLMQ_CACHE_DIR") from None


def cuda_include_dirs(major: int | None = None) -> list[Path]:
    """Return the folders that contain cuda_bf16.h: folders of pip packages, then of CUDA toolkits.
    major: the preferred CUDA release, such as 12; None if none is preferred."""
    packages = {12: "cuda_runtime/include", 13: "cu13/include"}
    order = sorted(packages, key=lambda m: m != major)
    try:
        import nvidia

        roots = [Path(p) for p in nvidia.__path__]
    except ImportError:
        roots = []
    folders = [root / packages[m] for m in order for root in roots]
    folders += [
        Path(os.environ[v]) / "include" for v in ("CUDA_PATH", "CUDA_HOME") if v in os.environ
    ]
    folders.append(Path("/usr/local/cuda/include"))
    return [path for path in folders if (path / "cuda_bf16.h").exists()]


def definitions(file: str, types: Mapping[str, str], consts: Mapping[str, int]) -> list[str]:
    """Return a `#define` line for each type variable of the file's kernels, then for each
    constant."""
    variables = TYPE_VARIABLES.get(file, set()) | set(types)
    lines = [f"#define {v} {types.get(v, DEFAULT_TYPE)}" for v in sorted(variables)]
    return lines + [f"#define {name} {value}" for name, value in sorted(consts.items())]


def kernel_text(file: str, entry: str) -> str:
    """Return the text of a kernel file, with the word ENTRY replaced by the entry point's name,
    which lets a file choose a header."""
    return re.sub(r"\bENTRY\b", entry, (KERNEL_DIR / file).read_text())


def program(source: KernelSource) -> str:
    """Return the complete source text for the compiler. Shared headers come before the definitions,
    because one-letter definitions would replace the headers' template parameters. The other kernels
    of the file become templates, for which the compiler generates no code."""
    file, entry, types, consts = source

    def declared(match: re.Match) -> str:
        return match.group() if match.group(1) == entry else "template <int = 0> "

    text = _ENTRY.sub(declared, kernel_text(file, entry))
    defined = definitions(file, dict(types), dict(consts))
    return "\n".join(['#include "common.cuh"', *defined, f'#line 1 "{file}"', text])


def digest(parts: Iterable[str | bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:32]


def included_texts(text: str, headers: dict[str, str]) -> list[str]:
    """Return the headers (name -> text) that `text` includes by `#include "name"`, directly or
    through other headers."""
    used: set[str] = set()
    pending = [text]
    while pending:
        for name in _INCLUDE.findall(pending.pop()):
            if name in headers and name not in used:
                used.add(name)
                pending.append(headers[name])
    return [headers[name] for name in sorted(used)]


def headers() -> dict[str, str]:
    """Return the texts of all headers in llmq/cu, by the names in `#include` lines, such as
    product/smem_tiles.cuh."""
    paths = sorted(KERNEL_DIR.rglob("*.cuh"))
    return {path.relative_to(KERNEL_DIR).as_posix(): path.read_text() for path in paths}


class Nvrtc:
    """Functions of NVRTC, CUDA's run-time compiler; a failing call raises RuntimeError. version:
    (major, minor)."""

    def __init__(self) -> None:
        load_libraries()
        from cuda.bindings import nvrtc

        self._nvrtc = nvrtc
        self.version: tuple[int, int] = self._call("nvrtcVersion")
        self.architectures: list[int] = self._call("nvrtcGetSupportedArchs")[0]

    def _call(self, name: str, *args: Any) -> tuple:
        status, *values = getattr(self._nvrtc, name)(*args)
        if status:
            raise RuntimeError(f"{name}: {status.name}")
        return tuple(values)

    def _read(self, what: str, program: Any) -> bytes:
        """Return a program's log or machine code. what: "ProgramLog" or "CUBIN"."""
        content = bytearray(self._call(f"nvrtcGet{what}Size", program)[0])
        self._call(f"nvrtcGet{what}", program, content)  # this call fills content
        return bytes(content)

    def compile(self, file: str, text: str, options: tuple[str, ...]) -> tuple[bytes | None, str]:
        """Return the machine code, or None if the text does not compile, and the compiler's
        messages."""
        (program,) = self._call("nvrtcCreateProgram", text.encode(), file.encode(), 0, [], [])
        try:
            flags = [option.encode() for option in options]
            (status,) = self._nvrtc.nvrtcCompileProgram(program, len(flags), flags)
            log = self._read("ProgramLog", program).decode(errors="replace").strip("\0 \n")
            return None if status else self._read("CUBIN", program), log
        finally:
            self._call("nvrtcDestroyProgram", program)


@functools.cache
def _nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except Exception as error:
        raise LlmqError(
            f"the CUDA kernel compiler NVRTC does not load ({error}); install cupy-cuda12x or "
            "cupy-cuda13x together with the NVRTC package of the same CUDA release"
        ) from error


def target(capability: int) -> str:
    """Return the architecture for which NVRTC compiles, such as sm_89: the GPU's own, or else the
    newest of the GPU's family that NVRTC knows."""
    family = [a for a in _nvrtc().architectures if a // 10 == capability // 10]
    usable = [a for a in family if a <= capability]
    if not usable:
        raise LlmqError(
            f"NVRTC {'.'.join(map(str, _nvrtc().version))} cannot compile for compute "
            f"capability {capability / 10}; install a newer CUDA release of CuPy"
        )
    # Only sm_90a allows Hopper's warpgroup matrix products and the transfer of registers between
    # warps.
    return "sm_90a" if max(usable) == 90 else f"sm_{max(usable)}"


def parse_resources(log: str) -> dict[str, Resources]:
    """Return the resources of each entry point by name, read from the assembler's -v report."""
    resources: dict[str, Resources] = {}
    for part in log.split("Compiling entry function '")[1:]:
        entry = part[: part.index("'")]

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match.group(1)) if match else 0

        resources[entry] = Resources(
            registers=number(r"Used (\d+) registers"),
            shared=number(r"(\d+) bytes smem"),
            spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            stack=number(r"(\d+) bytes stack frame"),
            serialized=bool(re.search(_SERIALIZED + f"'{entry}'", log)),
        )
    return resources


def compile_kernel(source: KernelSource, capability: int) -> Cubin:
    """Return a kernel's machine code for a GPU of this compute capability, compiled or from the
    cache. Raises LlmqError if the compiler or its headers are missing, and RuntimeError with the
    compiler's messages if the source does not compile."""
    nvrtc = _nvrtc()
    text = program(source)
    flags = [f"-arch={target(capability)}", *FLAGS]
    if nvrtc.version >= (12, 9):
        flags.append("--no-cache")  # NVRTC's own cache would suppress the report of resources
    if os.environ.get("LLMQ_LINEINFO") == "1":
        flags.append("-lineinfo")
    key = digest([text, *included_texts(text, headers()), *flags, str(nvrtc.version)])
    path = cache_dir() / f"{source.entry}-{key}.cubin"
    # Ranks and compile_ahead need the same kernels, so one thread compiles a kernel and the others
    # read the result.
    with _locks.setdefault(path, threading.Lock()):
        cached = _read(path)
        if cached is None:
            cached = _write(path, *_compile(nvrtc, source, text, flags))
    return cached


def compile_ahead(sources: Iterable[KernelSource], capability: int) -> None:
    """Start to compile these kernels into the cache, in a thread for each CPU, and return at once.
    A caller that needs a kernel earlier waits for its compilation or compiles the kernel, and gets
    any error. At exit the process waits only for the compilations that have begun."""
    waiting = deque(sorted(sources))
    # Plain threads replace an executor, because Python waits at exit until an executor has done all
    # waiting work.
    threads = [
        threading.Thread(target=_compile_waiting, args=(waiting, capability), daemon=True)
        for _ in range(os.cpu_count() or 1)
    ]
    atexit.register(_stop_compiling, waiting, threads)
    for thread in threads:
        thread.start()


def _compile_waiting(waiting: deque[KernelSource], capability: int) -> None:
    """Compile waiting kernels until none is left; each thread of compile_ahead runs this."""
    while True:
        try:
            source = waiting.popleft()
        except IndexError:  # no kernel is left to compile
            return
        # compiling at the kernel's first use raises the error again
        with contextlib.suppress(Exception):
            compile_kernel(source, capability)


def _stop_compiling(waiting: deque[KernelSource], threads: list[threading.Thread]) -> None:
    """Drop the waiting kernels and join the threads at exit, because NVRTC crashes in a thread that
    uses the library while it is unloaded."""
    waiting.clear()
    for thread in threads:
        thread.join()


def _compile(
    nvrtc: Nvrtc, source: KernelSource, text: str, flags: list[str]
) -> tuple[bytes, Resources]:
    """Compile the text; return the machine code and the resources of the entry point."""
    includes = cuda_include_dirs(nvrtc.version[0])
    if not includes:
        raise LlmqError(
            "cuda_bf16.h is not found; install nvidia-cuda-runtime-cu12 (or nvidia-cuda-runtime "
            "for CUDA 13), or set CUDA_PATH to a CUDA toolkit"
        )
    options = (*flags, f"-I{KERNEL_DIR}", f"-I{includes[0]}")
    code, log = nvrtc.compile(source.file, text, options)
    if code is None:
        raise RuntimeError(f"{source.file} does not compile ({' '.join(options)}):\n{log}")
    resources = parse_resources(log)
    if list(resources) != [source.entry]:
        raise RuntimeError(f'{source.file} has no extern "C" __global__ void {source.entry}')
    return code, resources[source.entry]


def _read(path: Path) -> Cubin | None:
    """Return the cached kernel; None if its files are missing or damaged. Raises ConfigError as
    `read_own` does."""
    try:
        code, facts = read_own(path), json.loads(read_own(path.with_suffix(".json")))
        if facts["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        resources = Resources(**facts["resources"])
    # `_write` reports errors of the folder
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return Cubin(path=path, code=code, resources=resources)


def _write(path: Path, code: bytes, resources: Resources) -> Cubin:
    """Write the cubin file, which CuPy loads by path, and a JSON file of the entry point's
    resources beside it."""
    facts = {"sha256": hashlib.sha256(code).hexdigest(), "resources": asdict(resources)}
    try:
        write_shared(path, code)
        write_shared(path.with_suffix(".json"), json.dumps(facts).encode())
    except OSError as error:
        raise LlmqError(
            f"cannot keep compiled kernels in {path.parent} ({error.strerror}); "
            "set LLMQ_CACHE_DIR to a folder that can be written"
        ) from error
    return Cubin(path=path, code=code, resources=resources)
