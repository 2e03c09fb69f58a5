"""Program text, cache and compiler report."""

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.errors import ConfigError, LlmqError
from llmq.runtime import compile
from llmq.runtime.compile import Resources, compile_kernel
from llmq.runtime.kernel import Kernel, KernelSource
from llmq.runtime.tuning import CHOICE_BYTES, AlgorithmFile

FILE = "compiled.cu"
SOURCE = """
#include "common.cuh"
#include "extra.cuh"
template <class T> __device__ T twice(T x) { return x + x; }
extern "C" __global__ void scale(T* y, const T* x, const G* g) {
    __shared__ float shared[FACTOR];
    shared[threadIdx.x] = to_f32(x[threadIdx.x]) * FACTOR + to_f32(g[0]);
    __syncthreads();
    y[threadIdx.x] = from_f32<T>(twice(shared[threadIdx.x ^ 1]));
}
extern "C" __global__ void __launch_bounds__((FACTOR + 1) * 32)
another(T* y) { y[threadIdx.x] = from_f32<T>(0.0f); }
"""
SCALE = Kernel(FILE, "scale", args="out T[*y] y, T[*x] x, G[*g] g")
KERNELS = ("scale", "another")
BOUND = KernelSource.of(SCALE, {"T": BF16}, {"FACTOR": 32})


def test_without_a_home_directory_the_cache_is_asked_for(monkeypatch):
    """A container's user may have no name."""
    for name in ("LLMQ_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="no home directory for the cache: set LLMQ_CACHE_DIR"):
        compile.cache_dir()
    monkeypatch.setenv("LLMQ_CACHE_DIR", "there")
    assert compile.cache_dir() == Path("there")


def nvrtc_loads() -> bool:
    try:
        compile._nvrtc()
    except LlmqError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not nvrtc_loads(), reason="NVRTC is not installed")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A kernel folder of its own with SOURCE, and an empty cache."""
    kernels = tmp_path / "cu"
    kernels.mkdir()
    for header in compile.KERNEL_DIR.glob("*.cuh"):
        (kernels / header.name).write_text(header.read_text())
    (kernels / "extra.cuh").write_text("// version 1\n")
    (kernels / FILE).write_text(SOURCE)
    monkeypatch.setattr(compile, "KERNEL_DIR", kernels)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def compilations(monkeypatch):
    """Counts runs of the compiler."""
    calls = []
    original = compile._compile
    monkeypatch.setattr(compile, "_compile", lambda *a: calls.append(a[1]) or original(*a))
    return calls


def entries(folder):
    return sorted((folder / "cache").iterdir())


def test_program_defines_bound_types_default_types_and_constants(folder):
    lines = compile.program(BOUND).splitlines()
    assert lines[:5] == [
        '#include "common.cuh"',
        "#define G f32",
        "#define T bf16",
        "#define FACTOR 32",
        f'#line 1 "{FILE}"',
    ]


def test_included_texts_are_found_through_other_headers_and_once():
    headers = {"a.h": '#include "b.h"\nA', "b.h": ' # include "a.h"\nB', "c.h": "C"}
    used = compile.included_texts('#include "a.h"\n#include <c.h>', headers)
    assert used == [headers["a.h"], headers["b.h"]]


def test_report_of_the_assembler():
    log = """ptxas info    : 4 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
ptxas         .     96 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 96 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 0 barriers
ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to program dependence on compiler-inserted WG.AR in divergent path in the function 'three'
ptxas info    : Compiling entry function 'three' for 'sm_90a'
ptxas info    : Used 168 registers, used 1 barriers
"""
    assert compile.parse_resources(log) == {
        "one": Resources(registers=40, shared=256, spilled=20, stack=96, serialized=False),
        "two": Resources(registers=14, shared=0, spilled=0, stack=0, serialized=False),
        "three": Resources(registers=168, shared=0, spilled=0, stack=0, serialized=True),
    }


def test_files_of_others_in_a_cache_that_others_may_write_to_are_refused(
    tmp_path, monkeypatch, capsys
):
    """Files in a shared cache are code that anybody may have put there."""
    path = tmp_path / "scale-0123.cubin"
    compile._write(
        path, b"code", Resources(registers=1, shared=0, spilled=0, stack=0, serialized=False)
    )
    tuned = AlgorithmFile(tmp_path / "tuned.json")
    tuned.publish("key", b"a" * CHOICE_BYTES, None)
    tmp_path.chmod(0o777)
    assert compile._read(path).code == b"code", "our own are as good as before"
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    for file in tmp_path.iterdir():
        with contextlib.suppress(PermissionError):
            os.chown(file, 1234, -1)  # root's are taken
    with pytest.raises(ConfigError, match=r"of another user .* others may write to: set LLMQ_CA"):
        compile._read(path)
    assert AlgorithmFile(tmp_path / "tuned.json").get("key") is None
    assert "of another user" in capsys.readouterr().err
    tmp_path.chmod(0o755)
    assert compile._read(path).code == b"code", "only who owns the folder can have put it there"
    assert AlgorithmFile(tmp_path / "tuned.json").get("key") == b"a" * CHOICE_BYTES


@needs_nvrtc
def test_cache_hits_and_what_makes_it_miss(folder, compilations):
    first = compile_kernel(BOUND, 90)
    assert first.code[:4] == b"\x7fELF"
    assert first.resources.shared == 128
    assert first.resources.spilled == 0
    assert compile_kernel(BOUND, 90) == first
    assert len(compilations) == 1
    for change in (
        lambda: compile_kernel(KernelSource.of(SCALE, {"T": F32}, dict(BOUND.consts)), 90),
        lambda: compile_kernel(BOUND._replace(consts=(("FACTOR", 64),)), 90),
        lambda: compile_kernel(BOUND, 80),
        lambda: (
            (compile.KERNEL_DIR / "extra.cuh").write_text("// version 2\n")
            and compile_kernel(BOUND, 90)
        ),
    ):
        before = len(compilations)
        change()
        assert len(compilations) == before + 1


@needs_nvrtc
def test_one_kernel_of_a_file_is_compiled(folder):
    alone = {entry: compile_kernel(BOUND._replace(entry=entry), 90) for entry in KERNELS}
    for entry, cubin in alone.items():
        assert [name for name in KERNELS if name.encode() in cubin.code] == [entry]
    assert [cubin.resources.shared for cubin in alone.values()] == [128, 0]
    with pytest.raises(RuntimeError, match=r'compiled\.cu has no extern "C" __global__ void a'):
        compile_kernel(BOUND._replace(entry="absent"), 90)


@needs_nvrtc
def test_a_damaged_entry_is_made_again(folder, compilations):
    good = compile_kernel(BOUND, 90)
    assert len(entries(folder)) == 2
    for entry in entries(folder):
        whole = entry.read_bytes()
        for damaged in (whole[:-1], whole[:10], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
            entry.write_bytes(damaged)
            assert compile_kernel(BOUND, 90) == good
            assert entry.read_bytes() == whole
    assert len(compilations) == 9


@needs_nvrtc
def test_the_file_holds_the_machine_code_alone(folder):
    cubin = compile_kernel(BOUND, 90)
    assert cubin.path.suffix == ".cubin" and cubin.path in entries(folder)
    assert cubin.path.read_bytes() == cubin.code


@needs_nvrtc
def test_threads_that_want_the_same_kernel_compile_it_once(folder, compilations):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(compile_kernel(BOUND, 90).code))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1
    assert len(results) == 4 and len(set(results)) == 1


@needs_nvrtc
def test_kernels_are_compiled_ahead_once_and_side_by_side(folder, monkeypatch):
    factors, calls, original = (32, 64), [], compile._compile
    together = threading.Barrier(len(factors), timeout=30)

    def compiled(nvrtc, file, text, flags):
        calls.append(text)
        together.wait()  # passes only where both are under way at the same time
        return original(nvrtc, file, text, flags)

    monkeypatch.setattr(compile, "_compile", compiled)
    monkeypatch.setattr(compile.os, "cpu_count", lambda: len(factors))
    sources = {KernelSource.of(SCALE, {"T": BF16}, {"FACTOR": factor}) for factor in factors}
    assert str(min(sources)) == "scale T=bf16 FACTOR=32"
    compile.compile_ahead(sources, 90)
    for source in sources:  # as launches do, which wait for what is under way
        assert compile_kernel(source, 90).resources.registers
    assert len(calls) == len(factors)


@needs_nvrtc
def test_errors_of_kernels_compiled_ahead_are_those_of_their_first_use(folder):
    (compile.KERNEL_DIR / FILE).write_text("nonsense")
    compile.compile_ahead([BOUND], 90)
    with pytest.raises(RuntimeError, match="does not compile"):
        compile_kernel(BOUND, 90)


FAILING_START = """
import os, sys, time
from llmq.runtime import compile
from llmq.runtime.tuning import CHOICE_BYTES, AlgorithmFile

def compile_slowly(source, capability):
    os.write(1, b"+")
    time.sleep(0.5)
    os.write(1, b"-")

compile.compile_kernel = compile_slowly
compile.compile_ahead(list(range(60 * os.cpu_count())), 90)
sys.exit(3)
"""


def test_a_process_that_ends_waits_for_no_more_than_what_is_being_compiled():
    command = [sys.executable, "-c", FAILING_START]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=20)  # all would take 30 s
    assert done.returncode == 3
    started, finished = done.stdout.count(b"+"), done.stdout.count(b"-")
    assert started == finished <= 3 * os.cpu_count()


@needs_nvrtc
def test_a_source_error_names_file_and_line(folder):
    (compile.KERNEL_DIR / FILE).write_text(SOURCE.replace("twice(shared", "thrice(shared"))
    with pytest.raises(RuntimeError, match=r'compiled\.cu\(9\): error: identifier "thrice"'):
        compile_kernel(BOUND, 90)
    assert not (folder / "cache").exists()


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_a_users_error(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(folder / "file" / "cache"))
    with pytest.raises(LlmqError, match="LLMQ_CACHE_DIR"):
        compile_kernel(BOUND, 90)


@needs_nvrtc
def test_architectures():
    assert compile.target(90) == "sm_90a"
    assert compile.target(89) == "sm_89"
    assert compile.target(88) == "sm_87" or compile.target(88) == "sm_88"
    with pytest.raises(LlmqError, match="compute capability 999"):
        compile.target(9990)


def test_digest_separates_its_parts():
    assert compile.digest(["ab", "c"]) != compile.digest(["a", "bc"])
    assert compile.digest([b"x"]) == compile.digest(["x"])
    assert len(compile.digest([])) == len(hashlib.sha256().hexdigest()[:32])
