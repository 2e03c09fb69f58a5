"""The choice of a machine, and how much host memory is left under cgroup limits."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from llmq.base.errors import ConfigError, LlmqError, warn_once
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.checks import attention_backend
from llmq.runtime import compile, cuda_api, cuda_device, host_usage, machine
from llmq.runtime import cudnn as cudnn_library
from llmq.runtime.device import DeviceSpec, MemorySizes
from llmq.runtime.machine import Machine, choose_machine, divide_gpus
from llmq.runtime.mesh import Mesh
from llmq.runtime.world import World, launched
from tests.runtime.fake_cudnn import FakeCudnn, fake_cupy

GPU = DeviceSpec(name="GPU", capability=90, num_sms=132, memory=80 << 30, library_workspace=0)


def no_gpu(monkeypatch):
    def missing(index):
        raise LlmqError("no NVIDIA driver is installed; install one, or use --device cpu")

    monkeypatch.setattr(cuda_api, "device_spec", missing)


def test_cpu_is_chosen_without_asking_for_gpus(monkeypatch):
    monkeypatch.setattr(cuda_api, "device_spec", None)
    chosen = choose_machine("cpu", 0)
    assert (chosen.kind, chosen.note, chosen.world_size) == ("host", None, 1)
    assert choose_machine("cpu", 3).world_size == 3


def test_auto_takes_a_gpu_or_says_why_not(monkeypatch):
    some_gpus(monkeypatch, GPU)
    chosen = choose_machine("auto", 1)
    assert (chosen.kind, chosen.spec, chosen.note) == ("cuda", GPU, None)
    assert chosen.world_size == 1
    no_gpu(monkeypatch)
    chosen = choose_machine("auto", 2)
    assert (chosen.kind, chosen.world_size) == ("host", 2)
    assert "meant for small models (no NVIDIA driver" in chosen.note


def test_what_is_not_there_is_an_error(monkeypatch):
    no_gpu(monkeypatch)
    with pytest.raises(LlmqError, match="no NVIDIA driver is installed"):
        choose_machine("cuda", 1)


def some_gpus(monkeypatch, *specs):
    """A machine with these GPUs; one that is an exception cannot be used."""

    def spec_of(index):
        if isinstance(specs[index], Exception):
            raise specs[index]
        return specs[index]

    monkeypatch.setattr(cuda_api, "device_spec", spec_of)
    monkeypatch.setattr(machine, "gpu_count", lambda: len(specs))


def test_all_gpus_or_the_first_ones(monkeypatch):
    some_gpus(monkeypatch, GPU, GPU, GPU)
    for device, gpus, world in (("cuda", 0, 3), ("auto", 0, 3), ("cuda", 2, 2), ("auto", 1, 1)):
        chosen = choose_machine(device, gpus)
        assert (chosen.kind, chosen.world_size, chosen.spec) == ("cuda", world, GPU)
        assert chosen.note is None
    with pytest.raises(ConfigError, match="--gpus: 4 are asked for, 3 can be seen; check CUDA_VIS"):
        choose_machine("cuda", 4)


def test_gpus_that_differ(monkeypatch):
    """Different GPUs work by the weaker one's capability, with the larger workspaces."""
    other = DeviceSpec(
        name="Old", capability=80, num_sms=108, memory=40 << 30, library_workspace=4 << 20
    )
    some_gpus(monkeypatch, GPU, other)
    chosen = choose_machine("cuda", 0)
    assert (
        chosen.note
        == "WARNING: the GPUs differ (GPU, Old): without --share each waits for the slowest."
    )
    assert chosen.spec == DeviceSpec(
        name="GPU", capability=80, num_sms=132, memory=40 << 30, library_workspace=4 << 20
    )


def test_a_gpu_among_others_that_cannot_be_used(monkeypatch):
    some_gpus(monkeypatch, GPU, LlmqError("GPU 1 (GT 710) has compute capability 3.5"))
    with pytest.raises(LlmqError, match=r"GPU 1 \(GT 710\) .*; to leave this GPU out use --gpus"):
        choose_machine("auto", 0)
    assert choose_machine("auto", 1).world_size == 1


def test_a_gpus_thread_moves_near_to_it(monkeypatch):
    calls = []
    monkeypatch.setattr(machine, "bus_id", lambda index: f"bus {index}")
    monkeypatch.setattr(machine, "stay_near", calls.append)
    monkeypatch.setattr(
        cuda_device, "CudaDevice", lambda *args, **kwargs: calls.append((args, kwargs))
    )
    sizes = MemorySizes(device=1, stack=2, pinned=3)
    two = machine.Machine(kind="cuda", spec=GPU, note=None, world=World.of(2))
    two.open(sizes, mesh=(mesh := Mesh.of(2, 1)), tune=False)
    options = {"graphs": True, "tune": False, "mesh": mesh}
    options |= {"num_sms": GPU.num_sms, "folders": ()}
    assert calls == ["bus 1", ((1, sizes), options)]
    calls.clear()
    machine.Machine(kind="cuda", spec=GPU, note=None).open(sizes)
    assert len(calls) == 1, "a single rank is the caller's thread"


def test_the_world_counts_ranks_through():
    world = World((2, 1, 3), ("a", "a", "b"), 2)
    assert (world.size, world.base, world.count, list(world.local)) == (6, 3, 3, [3, 4, 5])
    assert world.processes == (0, 0, 1, 2, 2, 2)
    assert (world.ranks_here, world.num_machines) == (3, 2)
    assert World((2, 1, 3), ("a", "a", "b"), 0).ranks_here == 3
    assert world.name(2) == "rank 2 on machine 'a'" and World.of(4).name(2) == "rank 2"


def test_gpus_are_divided_among_the_processes_of_a_machine():
    four = ["0", "1", "2", "3"]
    two_each = divide_gpus("aab", [(2, four), (2, four), (4, four)])
    assert two_each == [(0, 1), (2, 3), (0, 1, 2, 3)]
    assert divide_gpus("aab", [(0, four)] * 3) == [(0, 1), (2, 3), (0, 1, 2, 3)]
    own = [(1, ["2"]), (1, ["3"])]  # CUDA_VISIBLE_DEVICES of each its own
    assert divide_gpus("aa", own) == [(0,), (0,)]
    with pytest.raises(ConfigError, match=r"process 1 on machine 'a' needs 3 GPUs, .* 3 belong"):
        divide_gpus("aa", [(3, four), (3, four)])


def test_which_launcher_has_started_how_many():
    assert launched({}) == launched({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == 1
    assert launched({"OMPI_COMM_WORLD_SIZE": "2"}) == launched({"SLURM_STEP_NUM_TASKS": "2"}) == 2


# -- attention -----------------------------------------------------------------------------------


@pytest.fixture
def cudnn(monkeypatch):
    """A library that is installed; what was warned of is forgotten."""
    library = FakeCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", library)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    warn_once.cache_clear()
    forget_cudnn()
    yield library
    warn_once.cache_clear()
    forget_cudnn()
    assert library.open == 0


def forget_cudnn():
    """Close the libraries that checks have left to the run."""
    while cudnn_library._kept:
        cudnn_library._kept.popitem()[1].close()


def backend(attention, **options):
    """The backend that --attention means for this GPU."""
    given = {"model": "tiny", "from-scratch": True, "attention": attention, **options}
    gpu = Machine(kind="cuda", spec=GPU, note=None)
    return attention_backend(make_config(given), preset("tiny"), gpu)


def test_cudnn_is_taken_where_it_is_made_for_it(cudnn, capsys):
    assert [backend(name) for name in ("auto", "cudnn", "native")] == ["auto", "cudnn", "native"]
    fp32 = {"model-dtype": "fp32"}
    assert backend("auto", **fp32) == "native"
    with pytest.raises(ConfigError, match="--attention cudnn: it needs BF16, not F32; use --atte"):
        backend("cudnn", **fp32)
    assert capsys.readouterr().err == ""


def test_cudnn_knows_windows_but_no_documents(cudnn):
    assert backend("auto", **{"document-mask": True}) == "native"
    with pytest.raises(ConfigError, match="cudnn: it knows no documents within a sequence"):
        backend("cudnn", **{"document-mask": True})
    given = {"model": "tiny", "from-scratch": True, "attention": "cudnn"}
    windows = replace(preset("tiny"), sliding_window=50, windowed_layers=(True, False) * 3)
    gpu = Machine(kind="cuda", spec=GPU, note=None)
    built = cudnn.built
    assert attention_backend(make_config(given), windows, gpu) == "cudnn"
    assert cudnn.built - built == 4  # forward and backward, with the window and without
    given["attention"] = "auto"
    forget_cudnn()
    assert attention_backend(make_config(given), windows, gpu) == "auto"
    assert cudnn.built - built == 6  # not the backward, which is ours on Hopper


def missing(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)


def too_old(library, monkeypatch):
    library.version = 8900


def refusing(library, monkeypatch):
    library.refuses = RuntimeError


def greedy(library, monkeypatch):
    library.workspace = 1 << 40


@pytest.mark.parametrize(
    "trouble, message",
    [
        (missing, r"cuDNN attention is not available \(.*\); install nvidia-cudnn-cu12"),
        (too_old, "cuDNN 8900 is older than 90100"),
        (refusing, r"cuDNN 91900 cannot compute attention .* \(no engine\)"),
        (greedy, "asks for a workspace of 1099511627776 bytes"),
    ],
)
def test_a_cudnn_that_is_missing_or_refuses(cudnn, monkeypatch, capsys, trouble, message):
    """One clear line: an error where it was asked for, else a warning and our own kernels."""
    trouble(cudnn, monkeypatch)
    with pytest.raises(ConfigError, match=f"--attention cudnn: .*{message}.*use --attention nativ"):
        backend("cudnn")
    assert capsys.readouterr().err == ""
    assert (backend("auto"), backend("auto")) == ("native", "native")
    line = capsys.readouterr().err
    assert re.match(f"warning: attention runs on the native kernels: .*{message}", line)
    assert line.endswith("use --attention native\n") and line.count("\n") == 1
    assert backend("auto", **{"model-dtype": "fp32"}) == "native"
    assert backend("native") == "native"
    assert capsys.readouterr().err == ""


def test_the_cpu_has_no_cudnn():
    host = choose_machine("cpu", 1)
    given = {"model": "tiny", "from-scratch": True}
    assert attention_backend(make_config(given), preset("tiny"), host) == "native"
    with pytest.raises(ConfigError, match="--attention cudnn: it needs a GPU"):
        attention_backend(make_config(given | {"attention": "cudnn"}), preset("tiny"), host)


# -- host memory ---------------------------------------------------------------------------------


def test_host_memory_that_is_not_there(monkeypatch):
    chosen = choose_machine("cpu", 1)
    sizes = MemorySizes(device=3 << 20, stack=1 << 20, pinned=1 << 20)
    monkeypatch.setattr(machine, "available_host_memory", lambda: (5 << 20) - 1)
    with pytest.raises(LlmqError, match="out of memory: 5 MiB are needed, 4 MiB of host memory"):
        chosen.open(sizes)
    monkeypatch.setattr(machine, "available_host_memory", lambda: 5 << 20)
    chosen.open(sizes).close()
    with pytest.raises(LlmqError, match="out of memory: 10 MiB are needed"):
        choose_machine("cpu", 2).open(sizes)


def test_host_memory():
    available, total = host_usage.host_memory()
    assert 0 < available <= total
    assert 0 < host_usage.available_host_memory() <= available


GIB = 1 << 30


def group(folder, limit, used, cache, version=2):
    """The files of a memory cgroup."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nslab 7\n")


def test_limits_of_all_groups_above_count(tmp_path):
    """Version 2: a process in a group without a limit, inside one that has one."""
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    group(mount / "outer" / "inner", "max", GIB, 0)
    group(mount / "outer", 4 * GIB, 3 * GIB, GIB)
    assert list(host_usage._cgroup_headrooms(membership, mount)) == [2 * GIB]
    group(mount / "outer" / "inner", 2 * GIB, 3 * GIB, 0)
    assert list(host_usage._cgroup_headrooms(membership, mount)) == [0, 2 * GIB]


def test_container_that_knows_its_group_by_the_name_outside(tmp_path):
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n0::/\n")
    group(mount / "memory", 8 * GIB, 5 * GIB, GIB, version=1)
    assert list(host_usage._cgroup_headrooms(membership, mount)) == [4 * GIB]


def test_no_groups(tmp_path):
    assert list(host_usage._cgroup_headrooms(tmp_path / "none", tmp_path)) == []


def test_kernels_are_compiled_ahead_for_the_real_gpu_only(monkeypatch):
    calls = []
    monkeypatch.setattr(compile, "compile_ahead", lambda *args: calls.append(args))
    Machine(kind="host", spec=GPU, note=None).compile_ahead({1})
    assert calls == []
    monkeypatch.setattr(cuda_api, "compute_capability", lambda index: 90 + index)
    chooses_as_ada = replace(GPU, capability=89)  # LLMQ_CAPABILITY
    Machine(kind="cuda", spec=chooses_as_ada, note=None, indices=(10,)).compile_ahead({1})
    assert calls == [({1}, 100)]
