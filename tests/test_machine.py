"""Which machine is chosen, and how much host memory is left under cgroup limits."""

from __future__ import annotations

import pytest

from llmq import machine
from llmq.errors import LlmqError
from llmq.machine import available_host_memory, choose_machine, host_memory
from llmq.runtime import cuda_device
from llmq.runtime.device import DeviceSpec, MemorySizes

GPU = DeviceSpec(name="GPU", capability=90, num_sms=132, memory=80 << 30, library_workspace=0)


def no_gpu(monkeypatch):
    def missing(index):
        raise LlmqError("no NVIDIA driver is installed; install one, or use --device cpu")

    monkeypatch.setattr(cuda_device, "device_spec", missing)


def test_cpu_is_chosen_without_asking_for_gpus(monkeypatch):
    monkeypatch.setattr(cuda_device, "device_spec", None)
    chosen = choose_machine("cpu", 0)
    assert (chosen.kind, chosen.note) == ("host", None)


def test_auto_takes_a_gpu_or_says_why_not(monkeypatch):
    monkeypatch.setattr(cuda_device, "device_spec", lambda index: GPU)
    chosen = choose_machine("auto", 1)
    assert (chosen.kind, chosen.spec, chosen.note) == ("cuda", GPU, None)
    no_gpu(monkeypatch)
    chosen = choose_machine("auto", 0)
    assert chosen.kind == "host"
    assert "meant for small models (no NVIDIA driver" in chosen.note


def test_what_is_not_there_is_an_error(monkeypatch):
    no_gpu(monkeypatch)
    with pytest.raises(LlmqError, match="no NVIDIA driver is installed"):
        choose_machine("cuda", 1)
    with pytest.raises(LlmqError, match="--gpus: 2 ranks are not supported yet"):
        choose_machine("cpu", 2)


def test_host_memory_that_is_not_there(monkeypatch):
    chosen = choose_machine("cpu", 1)
    sizes = MemorySizes(device=3 << 20, stack=1 << 20, pinned=1 << 20)
    monkeypatch.setattr(machine, "available_host_memory", lambda: (5 << 20) - 1)
    with pytest.raises(LlmqError, match="out of memory: 5 MiB are needed, 4 MiB of host memory"):
        chosen.open(sizes)
    monkeypatch.setattr(machine, "available_host_memory", lambda: 5 << 20)
    chosen.open(sizes).close()


def test_host_memory():
    available, total = host_memory()
    assert 0 < available <= total
    assert 0 < available_host_memory() <= available


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
    assert list(machine._cgroup_headrooms(membership, mount)) == [2 * GIB]
    group(mount / "outer" / "inner", 2 * GIB, 3 * GIB, 0)
    assert list(machine._cgroup_headrooms(membership, mount)) == [0, 2 * GIB]


def test_container_that_knows_its_group_by_the_name_outside(tmp_path):
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n0::/\n")
    group(mount / "memory", 8 * GIB, 5 * GIB, GIB, version=1)
    assert list(machine._cgroup_headrooms(membership, mount)) == [4 * GIB]


def test_no_groups(tmp_path):
    assert list(machine._cgroup_headrooms(tmp_path / "none", tmp_path)) == []
