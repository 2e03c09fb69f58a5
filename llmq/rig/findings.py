"""Faults of a machine in words, each with a remedy; and console lines with the numbers that a part
of `llmq rig` has measured."""

from collections.abc import Callable, Iterator
from typing import Any

from llmq.options.cards import card_of
from llmq.runtime.device import DeviceSpec

# Theoretical GB/s of a PCIe lane in one direction, by PCIe generation.
LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
LEAST_BUS = 0.6  # a smaller share of the slot's theoretical rate is a fault
LEAST_COPY = 0.75  # a smaller share of the data sheet's bandwidth is a fault
LEAST_PRODUCT = 0.7  # a smaller share of the TFLOP/s that this kind of card sustains is a fault
SLOWER = 0.95  # a smaller share of the fastest GPU's rate is a fault
LIMITED = 0.97  # a smaller share of the card's default power limit is a fault
HELD = 0.1  # a larger share of readings with a reason for a lower clock is a fault
CROWDED = 0.75  # a smaller share of one GPU's copy rate, while all GPUs copy, is a fault
NO_ROOM = "not even a micro-batch of one sequence fits"  # the model is too large, which is no fault
PCIE_RISER = "see whether it sits in its slot, and whether a riser or the firmware limits it"

Report = dict[str, Any]


def words_on(report: Report) -> list[str]:
    """Return a sentence or two for each fault, the gravest fault first."""
    return [line for find in FINDINGS for line in find(report)]


def damaged(report: Report) -> Iterator[str]:
    """Report peer copies and collectives that damage data."""
    bad = [p for p in part_of(report, "bus").get("pairs", []) if p["reason"] == "damaged data"]
    pairs = ", ".join(f"{pair['source']} to {pair['reader']}" for pair in bad)
    if bad:
        iommu = " The IOMMU is on, which can cause this." if report["host"].get("iommu") else ""
        yield (
            f"Peer copies damage data (GPU {pairs}): llmq copies through host memory there, other "
            f"programs may not.{iommu} Switch IOMMU or ACS off in the firmware, or use "
            "NCCL_P2P_DISABLE=1 with them."
        )
    for backend, found in report["measured"].get("exchanges", {}).items():
        if found.get("intact") is False:
            yield (
                f"What GPUs gather by {backend} is not what was sent: do not train with it; "
                "--p2p off may help."
            )


def memory_errors(report: Report) -> Iterator[str]:
    """Report ECC errors, and memory rows that cannot be remapped."""
    for gpu in report["gpus"]:
        if gpu.get("ecc_errors"):
            yield (
                f"GPU {gpu['index']} has had {gpu['ecc_errors']} uncorrected memory errors since "
                "the driver was loaded: reset it or restart the machine, and watch whether they "
                "come again."
            )
        if gpu.get("rows_failed"):
            yield f"GPU {gpu['index']} cannot replace a broken row of its memory: have it replaced."


def hot(report: Report) -> Iterator[str]:
    """Report clocks held down by temperature, board or power supply; the power limit is no
    fault."""
    for record in part_of(report, "load").get("gpus", []):
        settled = record["settled"]
        held = {w: s for w, s in settled.get("reasons", {}).items() if s >= HELD}
        too_hot = [share for word, share in held.items() if "temperature" in word]
        if too_hot:
            yield (
                f"GPU {record['gpu']} throttles: temperature holds its clock down in "
                f"{max(too_hot):.0%} of the readings, at {settled.get('hottest', 0):.0f} °C. Give "
                "it more air, or a lower power limit."
            )
        if "hardware slowdown" in held or "power brake" in held:
            yield (
                f"GPU {record['gpu']} is slowed down by its board or its power supply "
                f"({', '.join(sorted(held))}): check the cables and what the supply can give."
            )


def slower(report: Report) -> Iterator[str]:
    """Report GPUs slower than the fastest GPU, because all GPUs of a run wait for the slowest."""
    records = part_of(report, "load").get("gpus", [])
    rates = {r["gpu"]: r["settled"].get("tflops") for r in records}
    rates = {gpu: rate for gpu, rate in rates.items() if rate}
    most = max(rates.values(), default=0.0)
    for gpu, rate in rates.items():
        if rate < SLOWER * most:
            clock = next(r["settled"].get("clock") for r in records if r["gpu"] == gpu)
            at = f" at {clock:.0f} MHz" if clock else ""
            yield (
                f"GPU {gpu} reaches {rate / most:.0%} of the fastest one's products under load"
                f"{at}: all GPUs of a run wait for it."
            )
    names = {gpu.get("name") for gpu in report["gpus"]} - {None}
    if len(names) > 1:
        yield (
            f"The GPUs differ ({', '.join(sorted(names))}): without --share each waits for the "
            "slowest. Measure each kind by itself, by CUDA_VISIBLE_DEVICES: plans need both rates."
        )


def slots(report: Report) -> Iterator[str]:
    """Report missing PCIe lanes, lower PCIe generations, and slow copies of host memory."""
    loaded = {r["gpu"]: r["settled"] for r in part_of(report, "load").get("gpus", [])}
    alone = part_of(report, "bus").get("alone", [])
    for gpu in report["gpus"]:
        index, now = gpu["index"], gpu | loaded.get(gpu["index"], {})
        width, most = (
            now.get("pcie_width"),
            max(_numbers(gpu, "width_most", "width_slot"), default=0),
        )
        generation, newest = now.get("pcie_generation"), gpu.get("pcie_generation_most")
        if width and width < most:
            yield (
                f"GPU {index} has {width:.0f} of the {most} PCIe lanes that it could have: put it "
                "into a slot with more, or take out what shares them (an NVMe disk may)."
            )
        if index in loaded and generation and newest and generation < newest:
            yield (
                f"GPU {index} runs PCIe {generation:.0f} under load where {newest} is possible: "
                f"{PCIE_RISER}."
            )
        if index < len(alone) and width and generation:
            paper = LANE.get(round(generation), 0) * width
            for way, name in (("in", "from"), ("out", "to")):
                rate = alone[index][way][0]
                if rate < LEAST_BUS * paper:
                    yield (
                        f"GPU {index} copies {rate:.1f} GB/s {name} host memory, of "
                        f"{paper:.0f} that its slot has on paper: {PCIE_RISER}."
                    )


def limits(report: Report) -> Iterator[str]:
    """Report driver settings that cost speed or start-up time."""
    for gpu in report["gpus"]:
        limit, default = gpu.get("power_limit"), gpu.get("power_default")
        if limit and default and limit < LIMITED * default:
            yield (
                f"GPU {gpu['index']} is limited to {limit:.0f} W, it comes with {default:.0f} W: "
                "it is slower, and needs less per token."
            )
    off = [str(gpu["index"]) for gpu in report["gpus"] if gpu.get("persistence") is False]
    if off:
        yield (
            f"Persistence mode is off (GPU {', '.join(off)}): each start of a program waits for "
            "the driver; `nvidia-smi -pm 1`, as root, switches it on."
        )


def busy(report: Report) -> Iterator[str]:
    """Report other processes on the GPUs."""
    for gpu in report["gpus"]:
        if gpu.get("others"):
            yield (
                f"GPU {gpu['index']} was in use by {gpu['others']} other process(es) when this "
                "began: the numbers are too low."
            )


def peers(report: Report) -> Iterator[str]:
    """Report pairs of GPUs without peer access, or with slow peer copies."""
    pairs = part_of(report, "bus").get("pairs", [])
    closed = [p for p in pairs if p["reason"] == "no access"]
    slow = [p for p in pairs if (p["reason"] or "").startswith("slow")]
    if closed:
        yield (
            f"{len(closed)} of {len(pairs)} ways between GPUs have no peer access, as on GeForce "
            "cards: data pass through host memory, which --memcpy-all-gather and "
            "--mirror-weights make faster."
        )
    for pair in slow:
        yield (
            f"Peer copies from GPU {pair['source']} to GPU {pair['reader']} are {pair['reason']}, "
            "slower than through host memory, which is used instead."
        )
    host = report["host"]
    through = any("pt" in word.partition("=")[2] for word in host.get("iommu_options", []))
    if (closed or slow) and host.get("iommu") and not through and not host.get("virtual"):
        yield (
            "The IOMMU translates addresses, and ACS may send peer copies through the processor: "
            "`iommu=pt` on the kernel's command line, or both off in the firmware, may help."
        )


def weak(report: Report) -> Iterator[str]:
    """Report rates far below the usual rates of this kind of card."""
    spec = report.get("spec")
    if not spec:
        return
    sizes = {name: spec[name] for name in ("capability", "num_sms", "memory")}
    card = card_of(DeviceSpec(name=spec["device"], **sizes))
    settled = [record["settled"] for record in part_of(report, "load").get("gpus", [])]
    copy = max((s["gb_per_s"] for s in settled if "gb_per_s" in s), default=None)
    if copy is not None and copy < LEAST_COPY * card.bandwidth:
        yield (
            f"Copies within GPU memory reach {copy:,.0f} GB/s, of {card.bandwidth:,.0f} on the "
            "data sheet: is ECC on, or does a display or another program use the card?"
        )
    product = max((s["tflops"] for s in settled if "tflops" in s), default=None)
    usual = card.sustained[0] * card.bf16
    if product is not None and product < LEAST_PRODUCT * usual:
        yield (
            f"Products in bf16 reach {product:.0f} TFLOP/s, where about {usual:.0f} are usual for "
            f"{card.name}: see the power limit and what holds the clock down."
        )


def shared(report: Report) -> Iterator[str]:
    """Report host links that GPUs share, and CPUs that the process may not use."""
    found = part_of(report, "bus").get("at_once", {})
    if len(found) > 1:
        number = max(found, key=int)
        one, each = min(found["1"]["both"]), min(found[number]["both"])
        if each < CROWDED * one:
            yield (
                f"{number} GPUs that copy at once get {each:.1f} GB/s each way, one alone "
                f"{one:.1f}: they share the host's memory or a switch, so offloading costs more "
                "on all of them."
            )
    host = report["host"]
    allowed, cores = host.get("cores_allowed"), host.get("cores")
    if allowed and allowed <= max(len(report["gpus"]), 1):
        yield (
            f"This process may use {allowed} of {cores} CPUs: one for each GPU and one more are "
            "what a run wants."
        )


def unknown(report: Report) -> Iterator[str]:
    """Report missing GPUs, a missing NVML, and missing measurements."""
    if report.get("problem"):
        yield f"There is no GPU to measure: {report['problem']}"
    elif report["gpus"] and not report.get("driver"):
        yield "NVML cannot be used: clocks, power and PCIe are not known; install nvidia-ml-py."
    for gpu in report["gpus"]:
        if gpu.get("nvml"):
            yield f"NVML tells nothing of GPU {gpu['index']}: {gpu['nvml']}."
    for name, part in report["parts"].items():
        if part["error"] and part["error"] != NO_ROOM:
            yield f"The measurement `{name}` is not whole: {part['error']}."


FINDINGS: tuple[Callable[[Report], Iterator[str]], ...] = (
    unknown, damaged, memory_errors, hot, slower, slots, limits, busy, peers, weak, shared,
)  # fmt: skip


def part_of(report: Report, name: str) -> dict[str, Any]:
    """Return the measurements of a part of `llmq rig`; {} without measurements."""
    return report["measured"].get(name) or {}


def _numbers(gpu: dict[str, Any], *names: str) -> Iterator[int]:
    return (gpu[f"pcie_{name}"] for name in names if gpu.get(f"pcie_{name}"))


LOAD = {
    "tflops": "{:.0f} TFLOP/s",
    "gb_per_s": "copies {:,.0f} GB/s",
    "power": "{:.0f} W",
    "hottest": "{:.0f} °C",
    "clock": "{:.0f} MHz",
}


def numbers_of(part: str, result: dict[str, Any]) -> Iterator[str]:
    """Yield console lines with the numbers of a result of `llmq rig`'s part `part`."""
    if part == "disk" and result:
        yield f"reads {result['read']:.1f} GB/s, writes {result['write']:.1f} GB/s"
    elif part == "bus":
        for count, rates in result.get("at_once", {}).items():
            to, out, both = (min(rates[way]) for way in ("in", "out", "both"))
            yield f"{count} GPU(s): {to:.1f} GB/s to each, {out:.1f} from it, {both:.1f} both ways"
        for pair in result.get("pairs", []):
            why = f", {pair['reason']}" if pair["reason"] else ""
            rate = f"{pair['gb_per_s'] or 0:.1f} GB/s ({pair['kind']}{why})"
            yield f"GPU {pair['source']} to {pair['reader']}: {rate}"
    elif part == "exchanges":
        for operation, points in result.get("operations", {}).items():
            nbytes, alone, beside = points[-1]  # the point of the largest slab comes last
            rates = (nbytes / seconds / 1e9 for seconds in (alone, beside))
            yield "{}: {:.1f} GB/s alone, {:.1f} beside other work".format(operation, *rates)
    elif part == "load":
        for record in result.get("gpus", []):
            settled = record["settled"]
            told = [form.format(settled[name]) for name, form in LOAD.items() if name in settled]
            told += [f"{word} {share:.0%}" for word, share in settled.get("reasons", {}).items()]
            yield f"GPU {record['gpu']}: {', '.join(told) or 'failed'}"
