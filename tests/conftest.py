"""Fixtures: random numbers, and the devices that kernels are tested on."""

# One thread: with two, OpenBLAS and torch's OpenMP spin, and on a machine whose cores are busy a
# step takes ten times as long. Before NumPy and torch are imported.
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import functools
import gc
import shutil
import signal
import sys
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmq.ops.common import CAPABILITY
from tests.emulator import device as emulator
from tests.harness import SIZES

KEPT_DAYS = 7  # after which a kernel is compiled again


def kept_kernels(root: Path) -> Path:
    """The folder of kernels that tests compile, one for all checkouts of a user who has a home. To
    make them all takes two minutes of two cores; those of texts that are gone would fill the disk.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmq-tests"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return root / ".pytest_cache" / "kernels"
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another run is faster
            if path.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def take_turns(config, worker: dict) -> None:
    """Have each worker of pytest-xdist begin with files of its own: it rewrites their assertions,
    which takes ten seconds for all, and finds those of the others compiled when it gets there."""
    files = [str(Path(arg)) for arg in config.args]
    if files == config.getini("testpaths"):  # pytest takes each file, even one that is left out
        found = set(map(str, Path(*files).rglob("test_*.py")))
        files = sorted(found - set(config.getoption("ignore") or ()))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = files[first:] + files[:first]


def pytest_configure(config):
    if worker := getattr(config, "workerinput", None):
        take_turns(config, worker)
    if "LLMQ_CACHE_DIR" not in os.environ:
        os.environ["LLMQ_CACHE_DIR"] = str(kept_kernels(config.rootpath))
    # transformers and datasets keep what they made of a test's files, which nobody needs again.
    kept = tempfile.TemporaryDirectory(prefix="llmq-tests-")
    config.add_cleanup(kept.cleanup)
    os.environ["HF_HOME"] = kept.name
    # A test's files need not outlive the machine, only processes: a run waits for the disk some
    # forty times. Tests of durability put their own in here; programs that are started, do it.
    os.fsync = lambda descriptor: None
    # transformers' own functions are the reference; these packages would take their place, also on
    # the CPU, where they fail.
    sys.modules["fla"] = sys.modules["causal_conv1d"] = None
    # The thread that watches progress bars never ends. Beside one no worker process is a fork
    # (`llmq.base.worker.forks`): each would start anew, which takes 0.4 s of processor time.
    with contextlib.suppress(ImportError):  # it comes with transformers
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    # A script's background jobs ignore Ctrl-C, and what they start too; tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session):
    """Leave modules and tests out of later collections of garbage, of which each closed Trainer
    makes one: with torch they are a million objects."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Those that take long come first: at the end others would wait for one worker. All workers
    have the same order, see take_turns."""
    by_file = hasattr(config, "workerinput")
    items.sort(
        key=lambda item: (item.get_closest_marker("slow") is None, by_file and str(item.path))
    )


@pytest.fixture(autouse=True)
def untried(request, monkeypatch):
    """An export has transformers make a text's ids, in a process that takes a second. Tests of that
    are marked."""
    if request.node.get_closest_marker("tried") is None:
        monkeypatch.setattr("llmq.text.tokenizer_files._trial", lambda folder, text: None)


@functools.cache
def gpu_problem() -> str | None:
    """Why no GPU can be used; None if one can."""
    try:
        from llmq.runtime.cuda_api import device_spec

        device_spec(0)
    except Exception as error:
        return str(error)
    return None


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on the test's name only."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> Path:
    """A folder with a small byte-level BPE, see text_data.write_bpe."""
    from tests.text_data import write_bpe

    return write_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each value of --device, in turn."""
    if request.param == "cuda" and (problem := gpu_problem()):
        pytest.skip(problem)
    return request.param


@pytest.fixture(params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def dev(request):
    """Each device that runs the CUDA kernels, in turn."""
    if request.param == "emulator":
        if problem := emulator.missing():
            pytest.skip(problem)
        yield emulator.EmulatorDevice(SIZES)
        return
    if problem := gpu_problem():
        pytest.skip(problem)
    from llmq.runtime.cuda_device import CudaDevice

    device = CudaDevice(0, SIZES, tune=False)
    yield device
    device.close()


@pytest.fixture(params=[89, pytest.param("cuda", marks=pytest.mark.gpu)])
def generic(request):
    """Each device that runs products of our own without the instructions of Hopper, in turn: of a
    compute capability, or a GPU that takes itself for one of 8.9."""
    if request.param != "cuda":
        if problem := emulator.missing():
            pytest.skip(problem)
        yield emulator.EmulatorDevice(SIZES, capability=request.param)
        return
    if problem := gpu_problem():
        pytest.skip(problem)
    from llmq.runtime.cuda_device import CudaDevice

    device = CudaDevice(0, SIZES, tune=False)
    device.spec = replace(device.spec, capability=89)
    yield device
    device.close()


@pytest.fixture
def hopper(dev):
    """`dev`, where it has the instructions of our own products."""
    if dev.spec.capability != CAPABILITY:
        pytest.skip(f"its instructions are those of compute capability {CAPABILITY}")
    return dev
