"""Installing brings these along: one list of packages in three files, and both releases of CUDA."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import time
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from llmq.base.errors import LlmqError
from llmq.runtime import cuda_api, cuda_libraries
from llmq.runtime.machine import choose_machine
from tests.conftest import gpu_problem
from tests.runs import make_workplace

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()


def wanted(gpu: bool) -> dict[str, str]:
    """Versions by name: what is for GPUs, or what is for every machine."""
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    return {r.name: str(r.specifier) for r in found if gpu is (r.marker is not None)}


def listed(name: str) -> dict[str, str]:
    """Versions by name in a file of requirements/, without the files that it includes."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line[0] not in "#-"]
    return {r.name: str(r.specifier) for r in found}


def test_the_files_list_what_the_project_needs():
    assert listed("cpu.txt") == wanted(gpu=False)
    assert "\n-r cpu.txt\n" in (ROOT / "requirements" / "cuda13.txt").read_text()
    of_13, plain = listed("cuda13.txt"), {"cublas", "cuda-runtime", "cuda-nvrtc"}
    renamed = {}
    for name, versions in wanted(gpu=True).items():
        stem = name.removeprefix("nvidia-").removesuffix("-cu12")
        new = f"nvidia-{stem}" if stem in plain else re.sub("cu12$|12x$", "", name)
        suffix = "" if new == name or stem in plain else "cu13" if name.endswith("12") else "13x"
        renamed[new + suffix] = ">=13,<14" if stem in plain else versions
    renamed["cuda-bindings"] = ">=13.0,<14"
    assert {n: set(v.split(",")) for n, v in of_13.items()} == {
        n: set(v.split(",")) for n, v in renamed.items()
    }


def test_the_bindings_of_both_releases_do():
    """PyTorch of CUDA 13 asks for the newer ones."""
    versions = Requirement(f"x{wanted(gpu=True)['cuda-bindings']}").specifier
    assert all(versions.contains(v) for v in ("12.9.2", "13.0.3", "13.5.0"))
    assert not versions.contains("14.0")


def test_readme_says_how_to_install():
    for name in ("cpu", "cuda13"):
        assert f"pip install -r requirements/{name}.txt && pip install --no-deps ." in README
    section = README.partition("## Installing")[2].partition("\n## ")[0]
    extras = section.partition("Extras")[2]
    assert all(f"`{extra}`" in extras for extra in PROJECT["optional-dependencies"])


# -- tools/resolve_installs.py -------------------------------------------------------------------


@pytest.fixture
def resolver(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("resolve_installs")


def test_ci_proves_that_every_way_resolves(resolver):
    assert "tools/resolve_installs.py" in CI
    assert set(resolver.WIDEST | resolver.WITHIN) == {
        ".", ".[test]", ". torch", ". peft lm-eval",
        "-r requirements/cpu.txt", "-r requirements/cuda13.txt",
    }  # fmt: skip


def test_an_older_library_beside_llmq_is_no_proof(resolver, monkeypatch):
    versions = {True: {"torch": "2.9.0", "numpy": "2.4"}, False: {"torch": "2.13.0"}}
    monkeypatch.setattr(resolver, "compiled", lambda way, *_: versions[bool(way[0])])
    way = (("pyproject.toml",), ("torch",))
    assert resolver.problem(way, "cache") == "only with torch 2.9.0 instead of 2.13.0"
    versions[True]["torch"] = "2.13.0"
    assert resolver.problem(way, "cache") is None


def test_what_does_not_resolve_is_a_failure(resolver, monkeypatch, capsys):
    monkeypatch.setattr(resolver, "compiled", lambda *_: {})
    assert resolver.problem(resolver.WITHIN["."], "cache") is None

    def clash(*_):
        raise RuntimeError("they clash")

    monkeypatch.setattr(resolver, "compiled", clash)
    assert resolver.main() == 1
    assert "pip install . torch: they clash\n" in capsys.readouterr().out


@pytest.mark.parametrize(("ci", "status"), [(None, 0), ("true", 1)])
def test_without_a_network_only_ci_fails(resolver, monkeypatch, capsys, ci, status):
    def unreachable(*_):
        raise resolver.NotReached("no route")

    monkeypatch.setattr(resolver, "compiled", unreachable)
    monkeypatch.delenv("CI", raising=False)
    if ci:
        monkeypatch.setenv("CI", ci)
    assert resolver.main() == status
    err = capsys.readouterr().err
    assert "the package index cannot be reached: no route\n" in err
    assert ("skipped: how llmq installs is not proven" in err) is (status == 0)


# -- on a machine with a GPU ---------------------------------------------------------------------


@pytest.fixture
def without_cupy(monkeypatch):
    """No CuPy, and NVML sees so many GPUs."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cuda_api, "cupy_release", lambda: None)
    cuda_api.load.cache_clear()

    def machine(gpus: int) -> None:
        nvml = SimpleNamespace(nvmlDeviceGetCount=lambda: gpus)
        monkeypatch.setattr(cuda_api, "open_nvml", lambda: nvml)

    yield machine
    cuda_api.load.cache_clear()


def test_a_gpu_without_its_packages_is_told_the_command(without_cupy, monkeypatch):
    without_cupy(1)
    extra = ["torch==2.13.0; extra == 'test'"]
    requires = {"llmq-train": PROJECT["dependencies"] + extra}
    monkeypatch.setattr(cuda_api.metadata, "requires", requires.__getitem__)
    with pytest.raises(LlmqError) as error:
        choose_machine("cuda", 1)
    note = choose_machine("auto", 1).note
    assert str(error.value) in note and "\n" not in note
    command = re.search("`(pip install .*?)`", note)[1]
    for name, versions in wanted(gpu=True).items():
        assert name in command
        assert all(part in command for part in versions.split(",")), name
    assert "numpy" not in command and "torch" not in command


def test_a_machine_without_a_gpu_is_told_no_command(without_cupy):
    without_cupy(0)
    assert "CuPy cannot be loaded" in choose_machine("auto", 1).note


# -- two releases of CUDA in one environment -----------------------------------------------------


@pytest.mark.parametrize("release", [12, 13, None])
def test_libraries_are_of_cupys_release_whatever_else_is_there(monkeypatch, release):
    """The others would find those of CUDA 13 first."""

    def distribution(name):
        if name != f"cupy-cuda{release}x":
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(locate_file=lambda path: f"/site/{path}")

    loaded = []
    monkeypatch.setattr(cuda_libraries.metadata, "distribution", distribution)
    monkeypatch.setattr(cuda_libraries.ctypes, "CDLL", loaded.append)
    assert cuda_libraries.cupy_release() == release
    cuda_libraries.load_libraries.__wrapped__()
    assert loaded == (release == 12) * [
        "/site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "/site/nvidia/cublas/lib/libcublasLt.so.12",
    ]


@pytest.mark.parametrize("alone", [True, False])
def test_the_driver_opens_ahead(monkeypatch, alone):
    """Only a process that shares no GPU takes a context of the first one."""
    opened, context = [], lambda place, index: opened.append(index)
    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDevicePrimaryCtxRetain=context)
    monkeypatch.setattr(cuda_libraries.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(cuda_libraries, "load_libraries", lambda: opened.append("libraries"))
    cuda_libraries.load_ahead(alone=alone)
    for thread in threading.enumerate():
        if thread.name == "CUDA":
            thread.join()
    assert opened == [0] * alone + ["libraries"]


def test_without_wheels_libraries_are_the_systems(monkeypatch):
    wheel = SimpleNamespace(locate_file=lambda path: f"/site/{path}")
    asked = []

    def missing(name):
        asked.append(name)
        raise OSError(name)

    monkeypatch.setattr(cuda_libraries.metadata, "distribution", lambda name: wheel)
    monkeypatch.setattr(cuda_libraries.ctypes, "CDLL", missing)
    cuda_libraries.load_libraries.__wrapped__()
    assert asked[1::2] == ["libnvrtc.so.12", "libcublasLt.so.12"]


BESIDE_PYTORCH = """
import sys
first = sys.argv[1]
if first == "torch":
    import torch
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
import llmq
from tests.runs import options
given = options(device="cuda", model_dtype="bf16", steps=3)
with llmq.Trainer(**{n.replace("-", "_"): v for n, v in given.items()}) as trainer:
    losses = [trainer.step().loss for _ in range(3)]
import torch
assert float((torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).sum()) == 512
assert all(0 < loss < 20 for loss in losses), losses
from llmq.runtime import compile, cuda_libraries
print(cuda_libraries.cupy_release(), compile._nvrtc().version[0])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["llmq", "torch"])
def test_a_run_beside_a_cuda_build_of_pytorch(tmp_path, first):
    """llmq and PyTorch in one process, whichever has loaded its libraries first."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        pytest.skip("this PyTorch is not a build for CUDA")
    if problem := gpu_problem():
        pytest.skip(problem)
    command = [sys.executable, "-c", BESIDE_PYTORCH, first]
    workplace = make_workplace(tmp_path)
    for _ in range(10):
        done = subprocess.run(command, cwd=workplace, capture_output=True, text=True)
        if "out of memory" not in done.stderr:
            break
        time.sleep(5)  # tests of other workers hold the whole GPU for some seconds
    assert done.returncode == 0, done.stderr
    release, nvrtc = done.stdout.split()[-2:]
    assert first == "torch" or release in ("None", nvrtc)
