"""`llmq rig`: what it says of made-up measurements, and that it keeps to its time."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from llmq.base.dtypes import BF16
from llmq.base.errors import ConfigError, DiskError, LlmqError
from llmq.bench import child
from llmq.ops.product.routes import Sizes, taken
from llmq.options.card_file import path_of, read_card_file
from llmq.options.cards import card_of_file
from llmq.options.presets import preset
from llmq.rig import bus, disk, exchanges, facts, load, rig, steps
from llmq.rig.findings import words_on
from llmq.rig.rig import card_file_of, run_rig
from llmq.runtime.cost import Kind
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.timing import LaunchTime
from tests.rigs import H100, job, report, results

# -- what is wrong, in words ---------------------------------------------------------------------


def test_nothing_is_wrong_with_a_rig_on_which_all_is_well():
    assert words_on(report(results())) == []


def narrow(parts):
    parts["load"]["gpus"][1]["settled"] = parts["load"]["gpus"][1]["settled"] | {"pcie_width": 4}
    parts["bus"]["alone"][1] = {"in": [13.0], "out": [13.0], "both": [10.0]}


def old_generation(parts):
    settled = parts["load"]["gpus"][0]["settled"]
    parts["load"]["gpus"][0]["settled"] = settled | {"pcie_generation": 3}


def riser(parts):
    parts["bus"]["alone"][0] = {"in": [6.0], "out": [50.0], "both": [6.0]}


def hot(parts):
    settled = parts["load"]["gpus"][1]["settled"]
    reasons = {"temperature (software)": 0.8, "power limit": 1.0}
    parts["load"]["gpus"][1]["settled"] = settled | {"reasons": reasons, "hottest": 88}


def too_hot(parts):
    """A GPU so hot that the hardware itself brakes, which sets two bits."""
    settled = parts["load"]["gpus"][1]["settled"]
    reasons = load.settled({"reasons": [0x40 | 0x8]})["reasons"]
    parts["load"]["gpus"][1]["settled"] = settled | {"reasons": reasons, "hottest": 95}


def slow(parts):
    settled = parts["load"]["gpus"][1]["settled"]
    parts["load"]["gpus"][1]["settled"] = settled | {"tflops": 540.0, "clock": 1200}


def brake(parts):
    settled = parts["load"]["gpus"][0]["settled"]
    parts["load"]["gpus"][0]["settled"] = settled | {"reasons": {"power brake": 1.0}}


def limited(parts):
    parts["facts"]["gpus"][0]["power_limit"] = 450.0


def no_persistence(parts):
    for gpu in parts["facts"]["gpus"]:
        gpu["persistence"] = False


def damage(parts):
    parts["bus"]["pairs"][1] |= {"kind": "staged", "reason": "damaged data"}
    parts["facts"]["host"]["iommu"] = True


def damaged_gather(parts):
    parts["exchanges"]["intact"] = False


def no_peers(parts):
    for pair in parts["bus"]["pairs"]:
        pair |= {"kind": "staged", "reason": "no access"}
    parts["facts"]["host"] |= {"iommu": True, "iommu_options": ["intel_iommu=on"]}


def slow_peers(parts):
    parts["bus"]["pairs"][0] |= {"kind": "staged", "reason": "slow (3.0 GB/s)"}


def broken_memory(parts):
    parts["facts"]["gpus"][1]["ecc_errors"] = 3


def lost(parts):
    parts["facts"]["gpus"][1] = {"index": 1, "nvml": "GPU is lost"}


def in_use(parts):
    parts["facts"]["gpus"][0]["others"] = 1


def weak(parts):
    for record in parts["load"]["gpus"]:
        settled = record["settled"]
        record["settled"] = settled | {n: settled[n] / 2 for n in ("tflops", "gb_per_s")}


def crowded(parts):
    parts["bus"]["at_once"]["2"]["both"] = [20.0, 21.0]


FAULTS = [
    (narrow, ["GPU 1 has 4 of the 16 PCIe lanes that it could have"]),
    (old_generation, ["GPU 0 runs PCIe 3 under load where 5 is possible"]),
    (riser, ["GPU 0 copies 6.0 GB/s from host memory, of 63 that its slot has on paper"]),
    (hot, ["GPU 1 throttles: temperature holds its clock down in 80% of the readings, at 88 °C"]),
    (too_hot, ["GPU 1 throttles: temperature holds its clock down in 100% of the readings, at 95"]),
    (slow, ["GPU 1 reaches 78% of the fastest one's products under load at 1200 MHz"]),
    (brake, ["GPU 0 is slowed down by its board or its power supply (power brake)"]),
    (limited, ["GPU 0 is limited to 450 W, it comes with 700 W"]),
    (no_persistence, ["Persistence mode is off (GPU 0, 1)"]),
    (damage, ["Peer copies damage data (GPU 1 to 0)"]),
    (damaged_gather, ["What GPUs gather by nccl is not what was sent"]),
    (no_peers, ["2 of 2 ways between GPUs have no peer access", "The IOMMU translates addresses"]),
    (slow_peers, ["Peer copies from GPU 0 to GPU 1 are slow (3.0 GB/s)"]),
    (broken_memory, ["GPU 1 has had 3 uncorrected memory errors"]),
    (lost, ["NVML tells nothing of GPU 1: GPU is lost."]),
    (in_use, ["GPU 0 was in use by 1 other process(es)"]),
    (weak, ["Copies within GPU memory reach 1,500 GB/s", "Products in bf16 reach 345 TFLOP/s"]),
    (crowded, ["2 GPUs that copy at once get 20.0 GB/s each way, one alone 48.0"]),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_is_told_and_no_other(fault, words):
    parts = results()
    fault(parts)
    found = words_on(report(parts))
    assert [line[: len(start)] for line, start in zip(found, words, strict=True)] == words


# -- the whole command ---------------------------------------------------------------------------


class StandIn:
    """Measurements that take what they are given, on a clock of their own."""

    def __init__(self, parts, takes=1.0):
        self.parts, self.takes, self.now, self.asked = parts, takes, 0.0, []

    def __call__(self, name, seconds, options):
        self.asked.append((name, seconds, options))
        self.now += min(self.takes * seconds, seconds + rig.GRACE)
        found = self.parts.get(name)
        if found is None:
            return {"result": {}, "error": "it broke"}
        return {"result": found, "error": None}

    def clock(self):
        return self.now


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_disk_is_measured_and_kept(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(disk, "SECONDS", 0.05)
    measuring, noted = job(30)
    disk.measure(measuring, folders=[str(tmp_path)], size=4 * disk.CHUNK)
    assert noted[-1]["read"] > 0 and noted[-1]["write"] > 0
    stand_in = StandIn(results() | {"disk": {"read": 7.0, "write": 3.5}})
    run_rig(tmp_path / "rig", 10.0, stand_in, stand_in.clock, ["a", "b"])
    kept = read_card_file(path_of(H100, 2))
    assert kept.disk == [7.0, 3.5] == card_of_file(kept).disk
    assert "reads 7.0 GB/s, writes 3.5 GB/s" in capsys.readouterr().out


def test_a_rig_is_measured_within_its_time(cache, tmp_path, capsys):
    stand_in = StandIn(results())
    out = tmp_path / "deep" / "rig"
    found = run_rig(out, 10.0, stand_in, stand_in.clock)
    assert stand_in.now <= 600 - rig.GRACE
    names = [name for name, *_ in stand_in.asked]
    assert list(dict.fromkeys(names)) == [*"facts bus exchanges load steps".split()]
    assert names.count("exchanges") == 4 and names.count("steps") == 1
    assert all(seconds > 0 for _, seconds, _ in stand_in.asked)
    assert found["words"] == []
    kept = read_card_file(path_of(H100, 2))
    assert kept.bus == {"1": [55.0, 55.0, 48.0], "2": [53.0, 54.0, 40.0]}
    assert kept.exchange["2"]["staged"]["all_gather"][1] == [[111 << 20], 5e-4]
    assert kept.exchange["2"]["staged"]["load"] == [[[55_000_000], 2e-3]]
    assert kept.slowest == 0.98 and set(kept.launches) > {"swiglu_forward/bf16,bf16,-"}
    assert read_card_file(tmp_path / "deep" / "rig.json").launches == kept.launches
    printed = capsys.readouterr().out
    assert "card file: " in printed and "Nothing is wrong." in printed
    assert "  2 GPU(s): 53.0 GB/s to each, 54.0 from it, 40.0 both ways" in printed
    assert "  GPU 0 to 1: 390.0 GB/s (peer)" in printed
    assert "  load: 55.0 GB/s alone, 27.5 beside other work" in printed
    assert "  GPU 1: 690 TFLOP/s, copies 3,000 GB/s, 698 W, 1500 MHz" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("Others who plan for such cards") and "llmq/cards" in last
    assert [path.name for path in out.parent.iterdir()] == ["rig.json"]
    report = json.loads((tmp_path / "deep" / "rig.json").read_text())
    assert report["spec"]["device"] == H100 and report["card_file"]["layout"]


def test_parts_that_hang_or_fail_leave_a_report(cache, tmp_path):
    parts = results()
    del parts["bus"], parts["load"]
    stand_in = StandIn(parts, takes=1.4)  # each is ended when it does not end by itself
    found = run_rig(tmp_path / "rig", 5.0, stand_in, stand_in.clock)
    assert stand_in.now <= 300 and found["command"] == "llmq rig --minutes 5"
    assert found["parts"]["bus"]["error"] == "it broke"
    assert any("`load` is not whole: it broke" in line for line in found["words"])
    assert read_card_file(path_of(H100, 2)).bus == {}


def test_a_full_disk_costs_neither_the_words_nor_the_card_file(
    cache, tmp_path, monkeypatch, capsys
):
    def full(path, content):
        raise DiskError(f"the disk is full, writing '{path}'")

    monkeypatch.setattr(rig, "write_file", full)
    parts = results()
    broken_memory(parts)
    with pytest.raises(DiskError):
        run_rig(tmp_path / "rig", 10.0, StandIn(parts, takes=0.1))
    assert "- GPU 1 has had 3 uncorrected memory errors" in capsys.readouterr().out
    assert read_card_file(path_of(H100, 2)).slowest == 0.98


def test_an_error_does_not_name_the_user(tmp_path, monkeypatch):
    """The path of the card file would name it: the report is to be shared."""
    monkeypatch.delenv("LLMQ_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    (tmp_path / "alice").mkdir()
    (tmp_path / "alice" / ".cache").touch()
    stand_in = StandIn(results())
    found = run_rig(tmp_path / "rig", 10.0, stand_in, stand_in.clock)
    assert "~/.cache" in found["parts"]["card file"]["error"]
    assert "alice" not in (tmp_path / "rig.json").read_text()


def test_why_there_is_no_gpu(monkeypatch):
    """Without the advice that is for runs: the rig has no --device."""

    def none(*_):
        raise LlmqError("no NVIDIA driver is installed; install one, or use --device cpu")

    monkeypatch.setattr(facts, "choose_machine", none)
    noted = []
    facts.measure(SimpleNamespace(note=noted.append))
    assert noted[0]["problem"] == "no NVIDIA driver is installed; install one"


def test_without_a_gpu_there_are_facts(cache, tmp_path, capsys):
    parts = results()
    parts["facts"] |= {"gpus": [], "problem": "no driver"}
    stand_in = StandIn(parts)
    found = run_rig(tmp_path / "rig", 10.0, stand_in, stand_in.clock)
    assert [name for name, *_ in stand_in.asked] == ["facts"]
    assert found["words"] == ["There is no GPU to measure: no driver"]
    printed = capsys.readouterr().out
    assert "There is no GPU to measure" in printed and "share" not in printed
    assert not cache.exists()


def test_nothing_measured_makes_no_card_file(cache, tmp_path):
    parts = results()
    del parts["steps"]
    stand_in = StandIn(parts, takes=0.1)
    found = run_rig(tmp_path / "rig", 10.0, stand_in, stand_in.clock)
    assert "no launch was measured" in found["parts"]["card file"]["error"]
    assert not cache.exists()


# -- parts, as far as they run without a GPU -----------------------------------------------------


def test_a_child_notes_what_it_finds():
    found = rig.run_part("facts", 5.0, {})
    assert found["result"]["host"]["cores"] > 0 and found["error"] is None
    broken = rig.run_part("load", 5.0, {"gpus": 1, "device": "none"})
    assert broken["result"] == {} and "LlmqError" in broken["error"]


def test_a_child_that_hangs_is_ended(monkeypatch):
    hangs = 'import sys, time; open(sys.argv[2], \'w\').write(\'{"result": {"a": 1}, '
    hangs += '"error": null}\'); time.sleep(60)'
    monkeypatch.setattr(child, "CHILD", (sys.executable, "-c", hangs))
    start = time.monotonic()
    found = rig.run_part("facts", 0.5, {}, grace=0.5)
    assert found["result"] == {"a": 1} and "was ended" in found["error"]
    assert time.monotonic() - start < 10


def test_facts_are_read_where_they_are(tmp_path):
    root = tmp_path
    for name, text in {
        "proc/cpuinfo": "processor : 0\nmodel name : A CPU\nflags : hypervisor\n",
        "proc/cmdline": "quiet intel_iommu=on iommu=pt\n",
        "sys/kernel/iommu_groups/0/x": "",
        "gpu/0000:19:00.0/max_link_width": "16\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    found = facts.host_facts(root)
    assert (found["cpu"], found["iommu"]) == ("A CPU", True)
    assert found["iommu_options"] == ["intel_iommu=on", "iommu=pt"] and found["virtual"]
    gpu = facts.gpu_facts(None, "0000:19:00.0", root / "gpu")
    assert gpu == {"pcie_width_slot": 16}
    assert facts.gpu_facts(None, "0000:20:00.0", root / "gpu") == {}


class Nvml:
    """A GPU that tells little, of a release that does not know the errors of ECC."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1

    def __getattr__(self, name):
        if name == "nvmlDeviceGetTotalEccErrors":
            raise AttributeError(name)
        known = {
            "nvmlDeviceGetHandleByPciBusId": "a handle",
            "nvmlDeviceGetName": H100,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetEnforcedPowerLimit": 450_000,
        }

        def ask(*_):
            if name not in known:
                raise self.NVMLError("not supported")
            return known[name]

        return ask


def test_what_nvml_does_not_tell_is_left_out(tmp_path):
    found = facts.gpu_facts(Nvml(), "0000:19:00.0", tmp_path)
    assert found == {"name": H100, "pcie_width": 8, "power_limit": 450.0}


def test_the_bus_of_a_single_gpu_is_noted(monkeypatch):
    rates = {"in": [55.0], "out": [54.0], "both": [48.0]}
    monkeypatch.setattr(bus, "together", lambda api, gpus: rates)
    monkeypatch.setattr("llmq.runtime.cuda_api.load", lambda: SimpleNamespace(runtime=None))
    work, notes = job()
    bus.measure(work, gpus=1)
    assert notes[-1]["alone"] == [rates]
    assert notes[-1]["at_once"] == {"1": {way: rates[way] for way in bus.WAYS}}


def test_a_slow_bus_is_measured_in_no_more_time_than_a_fast_one():
    """A riser with one lane: the part would be ended before it had said anything."""
    copies = []

    def copy(*_):
        copies.append(time.sleep(0.01))

    names = "memcpyDefault streamSynchronize eventRecord eventCreate eventDestroy eventElapsedTime"
    api = SimpleNamespace(**dict.fromkeys(names.split(), lambda *_: 100.0), memcpyAsync=copy)
    end = bus.End.__new__(bus.End)
    end.api, end.nbytes = api, bus.COPY
    end.device = end.host = end.streams = (0, 1)
    rate = end.rate((True, False), threading.Barrier(1), 0.1)
    assert 2 <= len(copies) - 2 <= 10
    assert rate == pytest.approx((len(copies) - 2) * bus.COPY / 0.1 / 1e9)


def test_load_settles_at_the_end_of_its_series():
    series = {
        "seconds": [1, 2, 3, 4, 5, 6],
        "tflops": [9.0, 9.0, 9.0, 8.0, 7.0, 6.0],
        "temperature": [50, 60, 91, 70, 70, 70],
        "reasons": [0x20, 0x4, 0x4, 0x4, 0x4, 0x44],
    }
    found = load.settled(series)
    assert found["tflops"] == 6.5 and found["hottest"] == 91
    assert found["reasons"] == {"power limit": 1.0, "temperature (hardware)": 0.5}
    assert load.settled({"seconds": []}) == {}
    # By its heat, by its power supply, and for a reason that the hardware does not tell.
    slowed = load.settled({"reasons": 3 * [0x48] + 2 * [0x88, 0x8]})["reasons"]
    assert slowed == {"power brake": 0.5, "hardware slowdown": 0.5}
    assert load.settled({"reasons": [0x48]})["reasons"] == {"temperature (hardware)": 1.0}


def test_load_of_several_devices():
    work, notes = job(0.6)
    load.measure(work, gpus=2, device="cpu", every=0.05)
    assert len(notes[-1]["gpus"]) == 2 and 0 < notes[-1]["slowest"] <= 1
    assert all(record["settled"]["tflops"] > 0 for record in notes[-1]["gpus"])


def test_exchanges_alone_and_beside_kernels(monkeypatch):
    for name, value in {"CALLS": 1, "REPLAYS": 1, "SIZES": (1,)}.items():
        monkeypatch.setattr(exchanges, name, value)
    work, notes = job()
    exchanges.measure(work, backend="nccl", gpus=2, device="cpu")
    (found,) = notes
    assert set(found["operations"]) == {"all_gather", "all_to_all", "reduce_scatter"}
    ((received, alone, beside),) = found["operations"]["all_gather"]
    assert received == 1 << 19 and alone > 0 and beside > 0
    assert found["intact"] and found["slowdown"] >= 1 and not found["beside_bus"]
    # Where they go through host memory, what is loaded from there meanwhile, too.
    work, notes = job()
    exchanges.measure(work, backend="staged", gpus=2, device="cpu")
    ((loaded, alone, beside),) = notes[0]["operations"].pop("load")
    assert loaded == 1 << 18 and alone > 0 and beside > 0
    assert set(notes[0]["operations"]) == {"all_gather", "all_to_all"}


def steps_spec():
    from llmq.options.cards import find_card, spec_of

    return spec_of(find_card("h100"))


def test_all_steps_are_runs_of_a_quarter_that_can_be_planned():
    from llmq.bench.bench import describe

    for options in steps.runs(True) + steps.runs(False):
        assert describe({"batch-size": 1} | options)["model"] == options["model"]
        whole = preset(options["model"])
        quarters = (
            options["num-layers"] / whole.num_layers,
            options["vocab-size"] / whole.vocab_size,
        )
        assert quarters == pytest.approx((0.25, 0.25), rel=0.01)
    for fp8 in (True, False):
        told = {
            (word, "lora-rank" in run)
            for run in steps.runs(fp8)
            for word in run.values()
            if word in ("int8", "nf4", "jit")
        }
        with_fp8 = {("jit", False), ("jit", True)} if fp8 else set()
        assert told == {("int8", False), ("int8", True), ("nf4", True)} | with_fp8
        assert {run["seq-len"] for run in steps.runs(fp8)} == {1024, 16384, 32768}


def test_steps_after_one_that_crashes(cache, tmp_path):
    """The first child measures one run and dies of the next, the second one has the rest."""
    parts, left = results(), []

    def measure(name, seconds, options):
        found = {"result": parts[name], "error": None}
        if name == "steps":
            left.append(options["runs"])
            found["error"] = "it crashed" if len(left) == 1 else None
        return found

    found = run_rig(tmp_path / "rig", 10.0, measure)
    assert left == [steps.runs(True, 2), steps.runs(True, 2)[2:]]
    assert len(found["measured"]["steps"]) == 2
    assert found["parts"]["steps 1.5B, e4m3, beside others"]["error"] == "it crashed"


def test_a_run_that_is_refused_ends_no_child(cache, tmp_path):
    """Not the first one either, whose title the child has: no other run is left out for it."""
    stand_in = StandIn(results(), takes=0.3)
    stand_in.parts["steps"]["refused"] = {"0": "it does not fit", "2": "nor this"}
    found = run_rig(tmp_path / "rig", 10.0, stand_in, stand_in.clock)
    assert [name for name, *_ in stand_in.asked].count("steps") == 1
    parts, (first, _, third, *_) = found["parts"], steps.runs(True, 2)
    assert parts[f"steps {steps.title_of(first)}"]["error"] is None
    refused = [parts[f"steps of {steps.title_of(run)}"]["error"] for run in (first, third)]
    assert refused == ["it does not fit", "nor this"]


def test_steps_that_there_is_no_time_for_are_one_line(cache, tmp_path):
    stand_in = StandIn(results(), takes=2.5)
    found = run_rig(tmp_path / "rig", 2.0, stand_in, stand_in.clock)
    late = [name for name, part in found["parts"].items() if part["error"]]
    assert late == ["steps 1.5B, e4m3, beside others", "card file"]


@pytest.mark.parametrize("told", [None, "matmul_swiglu"])
def test_products_beside_other_gpus_are_measured_where_there_are_some(monkeypatch, told):
    """Devices opened meanwhile take fused products; LLMQ_FUSED is restored afterwards."""
    monkeypatch.delenv("LLMQ_FUSED", raising=False)
    if told is not None:
        monkeypatch.setenv("LLMQ_FUSED", told)
    sizes = Sizes(4096, 151936, 896, BF16, BF16)

    def measured(job, options, settle):
        return {"own": taken(PlanDevice(steps_spec()), "glu", sizes) is not None}

    monkeypatch.setattr(steps, "_measured", measured)
    work, notes = job(10)
    alone, both = steps.runs(True), steps.runs(True, 2)
    beside = both[: steps.FIRST]
    assert both[steps.FIRST :] == alone and all(steps.BESIDE in run for run in beside)
    steps.measure(work, runs=[*beside, alone[0]])
    found = [record["own"] for record in notes[-1]["steps"]]
    assert found == [False] * steps.FIRST + [True]


def test_steps_that_do_not_fit_are_left_out(monkeypatch):
    def measured(job, options, settle):
        if options["model"] == "large":
            raise LlmqError("not even a micro-batch of one sequence fits")
        return {"options": options}

    monkeypatch.setattr(steps, "_measured", measured)
    work, notes = job(10)
    steps.measure(work, runs=[{"model": "large"}, {"model": "small"}])
    assert [found["options"]["model"] for found in notes[-1]["steps"]] == ["small"]
    assert notes[-1]["refused"] == {"0": "not even a micro-batch of one sequence fits"}
    late, notes = job(-1)
    steps.measure(late, runs=[{"model": "small"}] * 2)
    assert len(notes[-1]["steps"]) == 1


def test_launches_together_take_as_long_as_a_step():
    kind, other = Kind("copy/", (1 << 20,)), Kind("zero/", (1 << 20,))
    step = [launch(2.0, kind), launch(1.0, other), launch(9.0, other, main=False), launch(1.0)]
    table = steps.as_in_steps([step, step], 3e-3)
    assert table == {"copy/": [[[1 << 20], 1.5e-3]], "zero/": [[[1 << 20], pytest.approx(7.5e-4)]]}


def test_launches_that_waited_for_the_host_are_not_in_the_card_file():
    found = report(results()) | {"date": "2026-11-23 10:00 UTC", "llmq": "1"}
    (step,) = found["measured"]["steps"]
    assert "swiglu_forward/bf16,bf16,-" in card_file_of(found).launches
    found["measured"]["steps"] = [step | {"idle": -1.1}]
    with pytest.raises(ConfigError, match="no launch was measured"):
        card_file_of(found)


def launch(ms, kind=None, main=True):
    return LaunchTime("a launch", ms, 0, 0, main, kind)
