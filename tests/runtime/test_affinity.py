"""Threads stay on the CPUs beside their GPU."""

import os
import threading

import pytest

from llmq.runtime.machine import parse_cpus, stay_near, use_all_cpus

BUS_ID = "0000:C1:00.0"


def test_lists_of_cpus():
    assert parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpus("\n") == set()


def cpus_after(tmp_path, text):
    """The CPUs that a thread may use after it was told to stay near a GPU with these CPUs."""
    folder = tmp_path / BUS_ID.lower()
    folder.mkdir()
    (folder / "local_cpulist").write_text(text)
    found = []

    def run():
        stay_near(BUS_ID, tmp_path)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_only_the_calling_thread_moves(tmp_path):
    before = os.sched_getaffinity(0)
    first = min(before)
    assert cpus_after(tmp_path, f"{first},100000-100003") == {first}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("text", ["100000-100003\n", "\n", "what?"])
def test_cpus_that_are_not_ours_change_nothing(tmp_path, text):
    assert cpus_after(tmp_path, text) == os.sched_getaffinity(0)


def test_an_unknown_gpu_changes_nothing(tmp_path):
    before = os.sched_getaffinity(0)
    stay_near("0000:FF:00.0", tmp_path)
    assert os.sched_getaffinity(0) == before


def test_mpirun_does_not_keep_a_process_on_one_core():
    found = []

    def run():
        every = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(every)})
        use_all_cpus({"SLURM_STEP_NUM_TASKS": "2"})  # which was asked for what it gives
        found.append(os.sched_getaffinity(0) == {min(every)})
        use_all_cpus({"OMPI_COMM_WORLD_SIZE": "2"})
        found.append(os.sched_getaffinity(0) >= every)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True, True]
