"""Cards: data sheets of GPUs, and the share of each peak that a training step reaches.

The peaks come from NVIDIA's data sheets, as collected by the trainer llm.q. The shares that matrix
products reach were measured on two cards. For other cards the shares follow from llm.q's published
speeds. Measurements of this machine, a report, or a shared rig replace the sheet.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmq.base.dtypes import GIB
from llmq.base.errors import ConfigError, warn_once
from llmq.options.card_file import CardFile, folder, path_of, read_card_file, this_host
from llmq.runtime.device import DeviceSpec

# GB/s of a consumer's NVMe disk: reading by its data sheet, and writing once its cache is full; not
# measured.
DISK = (6.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU.

    name: the driver's name, followed by the memory's size where several cards share a name. memory:
    GiB, about as CUDA reports. bandwidth: GB/s of this memory. bus: GB/s of copies to the host, in
    one direction. link: GB/s of collectives over NVLink, 0 without NVLink. tf32, bf16, fp8: dense
    peaks with fp32 sums in TFLOP/s; fp8 is 0 if unsupported. power: largest power in W, of which an
    H100 draws 99 % in training; None for a laptop, whose maker sets it. sustained: shares of the
    bf16 and fp8 peaks that products reach in a step at the power limit. source: origin of these
    shares, for users. error: relative error of a predicted speed; None if rates were measured here.
    measured: rates of `llmq rig`, which replace the sheet. disk: GB/s of reading and writing in
    --offload-dir.
    """

    name: str
    capability: int
    num_sms: int
    memory: float
    bandwidth: float
    bus: float
    link: float
    tf32: float
    bf16: float
    fp8: float
    power: int | None
    sustained: tuple[float, float]
    source: str
    error: float | None
    measured: CardFile | None = None
    disk: Sequence[float] = DISK

    def plus_minus(self, gpus: int) -> str:
        """Text of the error with `gpus` GPUs, to follow a speed; "" if the error is None."""
        error = self.error_of(gpus)
        return "" if error is None else f" ± {100 * error:.0f} %"

    def error_of(self, gpus: int) -> float | None:
        """Relative error of a speed predicted for `gpus` GPUs, larger if exchanges were not
        measured; None if rates were measured here."""
        if gpus <= (1 if self.measured is None else self.measured.gpus):
            return self.error
        return (self.error or 0.0) + (SEVERAL[self.measured is not None] if self.link else STAGED)

    def joules(self, seconds: float, gpus: int) -> float | None:
        """Energy of `gpus` GPUs at the power limit; None if the limit is unknown."""
        return None if self.power is None else self.power * seconds * gpus

    @property
    def int8(self) -> float:
        """Dense int8 peak in TOP/s. On cards for data centers and workstations this is twice the
        bf16 peak (A100: 624, RTX A6000: 310, L4: 242). On GeForce cards it is four times the bf16
        peak, because their bf16 products with fp32 sums run at half rate (RTX 3090: 284, RTX 4090:
        661, RTX 5090: 838)."""
        return self.bf16 * (4 if self.sums_slowly else 2)

    @property
    def sums_slowly(self) -> bool:
        """True if tensor cores add bf16 and fp8 products in F32 at half their rate."""
        return "GeForce" in self.name or "GB10" in self.name

    @property
    def size(self) -> int:
        """Memory on the label, in GB."""
        return next(size for size in _SIZES if size >= self.memory)

    @property
    def driver_name(self) -> str:
        """The driver's name of the card, which cards with other memory may share."""
        plain = _without_size(self.name)
        return plain if plain in CARDS else self.name


# Memory sizes on labels, in GB.
_SIZES = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 288)

# GB/s of copies between a card and pinned memory. PCIe 5 x16: measured on an H100.
_PCIE5, _PCIE4 = 55.0, 26.0
_PCIE5_X8, _PCIE4_X8 = 27.0, 13.0
_C2C = 350.0  # Grace Hopper
# GB/s of collectives: half of NVLink's rate on paper, as NCCL's reduce-scatter reaches 212-236 of
# 450 GB/s on H200.
_NVLINK5, _NVLINK4, _NVLINK3 = 450.0, 225.0, 150.0

# By name after "NVIDIA ". If words fit several cards, find_card takes the first.
_COLUMNS = "capability num_sms memory bandwidth bus link tf32 bf16 fp8 power".split()
_SHEETS: dict[str, tuple[float, ...]] = {
    "H100 80GB HBM3": (90, 132, 79.1, 3350, _PCIE5, _NVLINK4, 494.7, 989.4, 1978.9, 700),
    "H100 PCIe": (90, 114, 79.1, 2000, _PCIE5, 0, 378.0, 756.0, 1513.0, 350),
    "H200": (90, 132, 139.8, 4800, _PCIE5, _NVLINK4, 494.7, 989.4, 1978.9, 700),
    "GH200 480GB": (90, 132, 94.5, 4000, _C2C, _NVLINK4, 494.7, 989.4, 1978.9, 900),
    "GH200 120GB": (90, 132, 94.5, 4000, _C2C, _NVLINK4, 494.7, 989.4, 1978.9, 900),
    "B200": (100, 148, 178.3, 8000, _PCIE5, _NVLINK5, 1100.0, 2200.0, 4500.0, 1000),
    "A100-SXM4-80GB": (80, 108, 79.1, 2039, _PCIE4, _NVLINK3, 156.0, 312.0, 0.0, 400),
    "A100-SXM4-40GB": (80, 108, 39.3, 1555, _PCIE4, _NVLINK3, 156.0, 312.0, 0.0, 400),
    "A100 80GB PCIe": (80, 108, 79.1, 1935, _PCIE4, 0, 156.0, 312.0, 0.0, 300),
    "A100-PCIE-80GB": (80, 108, 79.1, 1935, _PCIE4, 0, 156.0, 312.0, 0.0, 300),
    "A100-PCIE-40GB": (80, 108, 39.3, 1555, _PCIE4, 0, 156.0, 312.0, 0.0, 250),
    "L40S": (89, 142, 44.3, 864, _PCIE4, 0, 183.0, 362.05, 733.0, 350),
    "L40": (89, 142, 44.3, 864, _PCIE4, 0, 90.5, 181.0, 362.0, 300),
    "L4": (89, 58, 22.0, 300, _PCIE4, 0, 60.0, 121.0, 242.0, 72),
    "A40": (86, 84, 44.3, 696, _PCIE4, 0, 74.8, 149.7, 0.0, 300),
    "GeForce RTX 4090": (89, 128, 23.515, 1008, _PCIE4, 0, 82.6, 165.2, 330.3, 450),
    "GeForce RTX 4080": (89, 76, 15.5, 717, _PCIE4, 0, 48.7, 97.5, 194.9, 320),
    "GeForce RTX 4070": (89, 46, 11.6, 504, _PCIE4, 0, 29.1, 58.3, 116.6, 200),
    "GeForce RTX 4070 Ti": (89, 60, 11.6, 504, _PCIE4, 0, 40.1, 80.2, 160.4, 285),
    "GeForce RTX 5090": (120, 170, 31.3, 1792, _PCIE5, 0, 104.8, 209.5, 419.0, 575),
    "GeForce RTX 5080": (120, 84, 15.5, 960, _PCIE5, 0, 56.3, 112.6, 225.1, 360),
    "GeForce RTX 5070": (120, 48, 11.6, 672, _PCIE5, 0, 30.9, 61.7, 123.5, 250),
    "GeForce RTX 5070 Ti": (120, 70, 15.5, 896, _PCIE5, 0, 43.9, 87.9, 175.8, 300),
    "GeForce RTX 3090": (86, 82, 23.5, 936, _PCIE4, 0, 35.6, 71.0, 0.0, 350),
    "GeForce RTX 3090 Ti": (86, 84, 23.5, 1008, _PCIE4, 0, 40.0, 80.0, 0.0, 450),
    "GeForce RTX 3080": (86, 68, 9.6, 760, _PCIE4, 0, 29.8, 59.5, 0.0, 320),
    "GeForce RTX 3080 Ti": (86, 80, 11.6, 912, _PCIE4, 0, 34.1, 68.2, 0.0, 350),
    "GeForce RTX 3070": (86, 46, 7.6, 448, _PCIE4, 0, 20.3, 40.6, 0.0, 220),
    "GeForce RTX 3070 Ti": (86, 48, 7.6, 608, _PCIE4, 0, 21.7, 43.5, 0.0, 290),
    "RTX A6000": (86, 84, 47.4, 768, _PCIE4, 0, 77.4, 154.8, 0.0, 300),
    "RTX 6000 Ada Generation": (89, 142, 47.4, 960, _PCIE4, 0, 182.1, 364.2, 728.5, 300),
    "RTX PRO 6000 Blackwell Server Edition": (
        120, 188, 94.9, 1792, _PCIE5, 0, 251.9, 503.8, 1007.6, 600,
    ),
    "RTX PRO 6000 Blackwell Workstation Edition": (
        120, 188, 94.9, 1792, _PCIE5, 0, 251.9, 503.8, 1007.6, 600,
    ),
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": (
        120, 188, 94.9, 1792, _PCIE5, 0, 219.5, 438.9, 877.9, 300,
    ),
    "GB10": (121, 48, 119.6, 273, _PCIE5, 0, 29.7, 59.4, 118.8, 140),
}  # fmt: skip

# Cards whose peaks follow from a sibling's by multiprocessors x clock. Columns: multiprocessors,
# MHz, GiB, GB/s, bus, watts, sibling with its clock.
_RTX_4090 = ("GeForce RTX 4090", 2520)
_RTX_5070 = ("GeForce RTX 5070", 2512)
_RTX_3070 = ("GeForce RTX 3070", 1725)
_RTX_A6000 = ("RTX A6000", 1800)
_RTX_6000_ADA = ("RTX 6000 Ada Generation", 2505)
_RTX_PRO_6000 = ("RTX PRO 6000 Blackwell Workstation Edition", 2617)
_SCALED: dict[str, tuple[int, int, float, float, float, int | None, tuple[str, int]]] = {
    "GeForce RTX 4080 SUPER": (80, 2550, 15.5, 736, _PCIE4, 320, _RTX_4090),
    "GeForce RTX 4070 SUPER": (56, 2475, 11.6, 504, _PCIE4, 220, _RTX_4090),
    "GeForce RTX 4070 Ti SUPER": (66, 2610, 15.5, 672, _PCIE4, 285, _RTX_4090),
    "GeForce RTX 4060": (24, 2460, 7.6, 272, _PCIE4_X8, 115, _RTX_4090),
    "GeForce RTX 4060 Ti": (34, 2535, 15.5, 288, _PCIE4_X8, 165, _RTX_4090),
    "GeForce RTX 5060": (30, 2497, 7.6, 448, _PCIE5_X8, 145, _RTX_5070),
    "GeForce RTX 5060 Ti": (36, 2572, 15.5, 448, _PCIE5_X8, 180, _RTX_5070),
    "GeForce RTX 3060": (28, 1777, 11.6, 360, _PCIE4, 170, _RTX_3070),
    "GeForce RTX 3060 Ti": (38, 1665, 7.6, 448, _PCIE4, 200, _RTX_3070),
    "RTX A5500": (80, 1665, 23.5, 768, _PCIE4, 230, _RTX_A6000),
    "RTX A5000": (64, 1695, 23.5, 768, _PCIE4, 230, _RTX_A6000),
    "RTX A4500": (56, 1650, 19.6, 640, _PCIE4, 200, _RTX_A6000),
    "RTX A4000": (48, 1560, 15.5, 448, _PCIE4, 140, _RTX_A6000),
    "RTX A2000": (26, 1200, 11.6, 288, _PCIE4, 70, _RTX_A6000),
    "RTX 5880 Ada Generation": (110, 2460, 47.4, 960, _PCIE4, 285, _RTX_6000_ADA),
    "RTX 5000 Ada Generation": (100, 2550, 31.3, 576, _PCIE4, 250, _RTX_6000_ADA),
    "RTX 4500 Ada Generation": (60, 2580, 23.5, 432, _PCIE4, 210, _RTX_6000_ADA),
    "RTX 4000 Ada Generation": (48, 2175, 19.6, 360, _PCIE4, 130, _RTX_6000_ADA),
    "RTX 2000 Ada Generation": (22, 2130, 15.5, 224, _PCIE4_X8, 70, _RTX_6000_ADA),
    "RTX PRO 4000 Blackwell": (70, 2055, 23.5, 672, _PCIE5, 140, _RTX_PRO_6000),
    # Cards with other memory under a name from above; some also have another chip.
    "GeForce RTX 5060 Ti 8GB": (36, 2572, 7.6, 448, _PCIE5_X8, 180, _RTX_5070),
    "GeForce RTX 4060 Ti 8GB": (34, 2535, 7.6, 288, _PCIE4_X8, 165, _RTX_4090),
    "GeForce RTX 3080 12GB": (70, 1710, 11.6, 912, _PCIE4, 350, _RTX_3070),
    "GeForce RTX 3060 8GB": (28, 1777, 7.6, 240, _PCIE4, 170, _RTX_3070),
    "GeForce RTX 3050": (20, 1777, 7.6, 224, _PCIE4_X8, 130, _RTX_3070),
    "GeForce RTX 3050 6GB": (18, 1470, 5.6, 168, _PCIE4_X8, 70, _RTX_3070),
    "RTX A2000 6GB": (26, 1200, 5.6, 288, _PCIE4, 70, _RTX_A6000),
    # The laptops' multiprocessors (CUDA cores / 128), the upper end of the boost clock, memory and
    # the width of its bus are from NVIDIA's table for GeForce laptops
    # (nvidia.com/geforce/gaming-laptops/compare); bandwidth is width x rate of its chips. Laptops
    # with RTX Ada have the clock at which their data sheets' FP32 TFLOP/s are reached. No laptop of
    # the generation after Ada gives the card more than 8 lanes for certain.
    "GeForce RTX 5090 Laptop GPU": (82, 2160, 23.5, 896, _PCIE5_X8, None, _RTX_5070),
    "GeForce RTX 5080 Laptop GPU": (60, 2287, 15.5, 896, _PCIE5_X8, None, _RTX_5070),
    "GeForce RTX 5070 Ti Laptop GPU": (46, 2220, 11.6, 672, _PCIE5_X8, None, _RTX_5070),
    "GeForce RTX 5070 Laptop GPU": (36, 2347, 7.6, 384, _PCIE5_X8, None, _RTX_5070),
    "GeForce RTX 5060 Laptop GPU": (26, 2497, 7.6, 384, _PCIE5_X8, None, _RTX_5070),
    "GeForce RTX 5050 Laptop GPU": (20, 2662, 7.6, 384, _PCIE5_X8, None, _RTX_5070),
    "GeForce RTX 4090 Laptop GPU": (76, 2040, 15.5, 576, _PCIE4, None, _RTX_4090),
    "GeForce RTX 4080 Laptop GPU": (58, 2280, 11.6, 432, _PCIE4, None, _RTX_4090),
    "GeForce RTX 4070 Laptop GPU": (36, 2175, 7.6, 256, _PCIE4_X8, None, _RTX_4090),
    "GeForce RTX 4060 Laptop GPU": (24, 2370, 7.6, 256, _PCIE4_X8, None, _RTX_4090),
    "GeForce RTX 4050 Laptop GPU": (20, 2370, 5.6, 192, _PCIE4_X8, None, _RTX_4090),
    "GeForce RTX 3080 Ti Laptop GPU": (58, 1590, 15.5, 512, _PCIE4, None, _RTX_3070),
    "GeForce RTX 3080 Laptop GPU": (48, 1710, 15.5, 448, _PCIE4, None, _RTX_3070),
    "GeForce RTX 3080 Laptop GPU 8GB": (48, 1710, 7.6, 448, _PCIE4, None, _RTX_3070),
    "GeForce RTX 3070 Ti Laptop GPU": (46, 1485, 7.6, 448, _PCIE4, None, _RTX_3070),
    "GeForce RTX 3070 Laptop GPU": (40, 1620, 7.6, 448, _PCIE4, None, _RTX_3070),
    "GeForce RTX 3060 Laptop GPU": (30, 1703, 5.6, 336, _PCIE4, None, _RTX_3070),
    "GeForce RTX 3050 Ti Laptop GPU": (20, 1695, 3.6, 192, _PCIE4_X8, None, _RTX_3070),
    "GeForce RTX 3050 Laptop GPU": (16, 1740, 3.6, 192, _PCIE4_X8, None, _RTX_3070),
    "RTX 5000 Ada Generation Laptop GPU": (76, 2190, 15.5, 576, _PCIE4, None, _RTX_6000_ADA),
    "RTX 4000 Ada Generation Laptop GPU": (58, 2263, 11.6, 432, _PCIE4, None, _RTX_6000_ADA),
    "RTX 3500 Ada Generation Laptop GPU": (40, 2246, 11.6, 432, _PCIE4, None, _RTX_6000_ADA),
    "RTX 3000 Ada Generation Laptop GPU": (36, 2159, 7.6, 256, _PCIE4_X8, None, _RTX_6000_ADA),
    "RTX 2000 Ada Generation Laptop GPU": (24, 2360, 7.6, 256, _PCIE4_X8, None, _RTX_6000_ADA),
}

MEASURED = "measured on this card"
PUBLISHED = "from llm.q's published speeds on this card"

# Shares of the bf16 and fp8 peaks (F32 sums) that products reach, the predictions' relative error,
# and the source. The shares of H100 and H200 are from benchmarks/; the other shares fit a plan of
# llm.q's step to its published speeds (published.md). Shares of GeForce cards may exceed 1 because
# they clock higher than their sheets say. An error is the largest error of a run that is predicted
# from all other runs, plus our plans' error on an H100.
_OURS = 0.04
# Errors added for exchanges that were not measured. SEVERAL: for exchanges over NVLink; key: True
# if launches were measured; the values are what two and four H200 add to the error of one
# (h200_several.md). STAGED: for exchanges through the host, where few runs were compared.
SEVERAL = {True: 0.03, False: 0.05}
STAGED = 0.1
_SUSTAINED: dict[str, tuple[float, float, float, str]] = {
    "H100 80GB HBM3": (0.71, 0.615, 0.05, MEASURED),
    "H200": (0.71, 0.59, 0.05, MEASURED),  # bf16: the H100's share, not measured
    "GeForce RTX 4090": (0.97, 0.95, 0.07 + _OURS, PUBLISHED),
    "GeForce RTX 5090": (1.05, 1.05, 0.04 + _OURS, PUBLISHED),
    "GeForce RTX 5060 Ti": (1.06, 1.07, 0.03 + _OURS, PUBLISHED),
    "RTX PRO 6000 Blackwell Server Edition": (0.74, 0.68, 0.05 + _OURS, PUBLISHED),
    "L40S": (0.53, 0.42, 0.07 + _OURS, PUBLISHED),
}
# Relative errors if a card borrows another card's shares: the deviation among the cards above.
# GeForce cards are alike; cards for servers have various power limits.
_GEFORCE_ERROR, _OTHER_ERROR = 0.15 + _OURS, 0.41 + _OURS


def _without_size(name: str) -> str:
    return re.sub(r" \d+GB$", "", name)


def is_laptop(name: str) -> bool:
    """True if a card of this name is built into laptops."""
    return "Laptop" in name


def is_data_center(name: str) -> bool:
    """True if a card of this name is made for servers: letters and a number (H100, L40S, A10, Tesla
    T4) except GB10, or a server edition."""
    words = name.removeprefix("NVIDIA ").removeprefix("Tesla ").replace("-", " ").split()
    product = words[0] if words else ""
    return "Server" in words or (product != "GB10" and bool(re.match(r"[A-Z]+\d", product)))


def _like(name: str, capability: int) -> str:
    """The card whose shares of peaks stand for a card without measured speed."""
    geforce = name.startswith("GeForce")
    if capability in (86, 89):
        return "GeForce RTX 4090" if geforce else "L40S"
    if capability >= 120:
        return "GeForce RTX 5090" if geforce else "RTX PRO 6000 Blackwell Server Edition"
    return "H100 80GB HBM3"


def _card(name: str) -> Card:
    if name in _SCALED:
        num_sms, clock, memory, bandwidth, bus, power, (sibling, sibling_clock) = _SCALED[name]
        capability, sibling_sms, *_, tf32, bf16, fp8, _ = _SHEETS[sibling]
        ratio = num_sms * clock / (sibling_sms * sibling_clock)
        peaks = (tf32 * ratio, bf16 * ratio, fp8 * ratio)
        sheet = (capability, num_sms, memory, bandwidth, bus, 0.0, *peaks, power)
    else:
        sheet = _SHEETS[name]
    own = _without_size(name)
    like = own if own in _SUSTAINED else _like(name, sheet[0])
    *sustained, error, source = _SUSTAINED[like]
    if like != own:
        error = _GEFORCE_ERROR if name.startswith("GeForce") else _OTHER_ERROR
        source = f"from its data sheet, of which it is taken to reach as much as {like}"
        if is_laptop(name):
            source += "; at the highest power that a laptop gives it"
    columns = dict(zip(_COLUMNS, sheet, strict=True))
    return Card(
        name=f"NVIDIA {name}", **columns, sustained=tuple(sustained), source=source, error=error
    )


def spec_of(card: Card) -> DeviceSpec:
    """The card as a device to plan for."""
    return DeviceSpec(
        name=card.name,
        capability=card.capability,
        num_sms=card.num_sms,
        memory=int(card.memory * GIB),
    )


CARDS: dict[str, Card] = {card.name: card for card in map(_card, (*_SHEETS, *_SCALED))}


NEAREST = 5  # number of cards that the error for an unknown name suggests


def find_card(words: str) -> Card:
    """Return the card of --card: the first card with all words in its name. A memory size counts as
    a word ("5060 ti 8gb"); then the shortest matching name wins. Unknown words are split at digits
    ("rtx5060ti"). ConfigError names the nearest cards."""
    given = re.sub(r"(\d+) ?(gb|gib|g)\b", r" \1gb ", words.lower().replace("-", " "))
    apart = re.findall(r"\d+gb\b|\d+|[^\d\s]+", given)
    for wanted in (given.split(), apart):
        found = [card for card in CARDS.values() if wanted and set(wanted) <= _words(card)]
        if any(re.fullmatch(r"\d+gb", word) for word in wanted):
            found.sort(key=lambda card: len(_without_size(card.name).split()))
        if found:
            return found[0]
    if not apart:
        raise ConfigError("--card: expected words of a card's name, such as 4090 or '5060 ti 8gb'")
    near = ", ".join(f"{c.name} ({c.size} GB)" for c in _nearest(apart))
    raise ConfigError(f"--card: no card is known as '{words}'; the nearest are {near}")


def _words(card: Card) -> set[str]:
    return {*_plain(card).split(), f"{card.size}gb"}


def _plain(card: Card) -> str:
    return card.name.lower().replace("-", " ")


def _nearest(wanted: list[str]) -> list[Card]:
    """Cards with most of the words; ties by similarity of the names."""
    text = " ".join(wanted)

    def likeness(card: Card) -> tuple[int, float]:
        name = _plain(card).removeprefix("nvidia ").removeprefix("geforce ")
        return len(set(wanted) & _words(card)), difflib.SequenceMatcher(None, text, name).ratio()

    return sorted(CARDS.values(), key=likeness, reverse=True)[:NEAREST]


def card_of(spec: DeviceSpec) -> Card:
    """Return the card of an installed GPU, by name and memory. An unknown GPU gets a similar card,
    scaled by the number of multiprocessors: nearest in capability, then in being for laptops or
    not, then in multiprocessors."""
    named = [card for card in CARDS.values() if spec.name in (card.name, card.driver_name)]
    if named:
        return min(named, key=lambda card: abs(card.memory * GIB - spec.memory))

    def unlikeness(card: Card) -> tuple[int, bool, int]:
        other_kind = is_laptop(card.name) != is_laptop(spec.name)
        sms = abs(card.num_sms - spec.num_sms)
        return abs(card.capability - spec.capability), other_kind, sms

    near = min(CARDS.values(), key=unlikeness)
    ratio = spec.num_sms / near.num_sms
    scaled = {name: ratio * getattr(near, name) for name in ("bandwidth", "tf32", "bf16", "fp8")}
    named = CARDS.get(_without_size(spec.name))
    return replace(
        near,
        name=spec.name,
        capability=spec.capability,
        num_sms=spec.num_sms,
        memory=spec.memory / GIB,
        power=None if named is None else named.power,
        source=f"not known, taken as {near.name} with {spec.num_sms} multiprocessors",
        error=max(near.error, _GEFORCE_ERROR if "GeForce" in spec.name else _OTHER_ERROR),
        **scaled,
    )


def card_with(memory: int) -> Card:
    """The card of known speed whose memory, in bytes, is nearest to `memory`."""
    measured = [CARDS[f"NVIDIA {name}"] for name in _SUSTAINED]
    return min(measured, key=lambda card: abs(card.memory * GIB - memory))


SIBLING = 0.1  # relative difference of memory above which cards of one name differ
# Relative error of predictions by another rig's rates: two H100 ran llm.q's steps 0 to 7 % apart
# (benchmarks/published.txt).
OTHER_RIG = 0.08
SHARED = Path(__file__).parents[1] / "cards"
"""Folder of card files that owners of rigs have shared."""


def card_of_file(file: CardFile) -> Card:
    """A rig's GPU as a card with measured rates."""
    return _measured(card_of(file.spec()), file, own=file.host == this_host())


def _measured(card: Card, file: CardFile, *, own: bool) -> Card:
    where = "this rig" if own else f"a rig of {file.gpus}"
    source = f"rates measured on {where} by `llmq rig`, {file.day}"
    error, disk = None if own else OTHER_RIG, file.disk or DISK
    return replace(card, measured=file, source=source, error=error, disk=disk)


def card_from(path: Path) -> Card:
    """Return the card of --card-file. Raises ConfigError."""
    try:
        return card_of_file(read_card_file(path))
    except ConfigError as error:
        raise ConfigError(f"--card-file: {error}") from None


def together(cards: Sequence[Card]) -> Card:
    """Return one card that stands for several: the names and sources of all cards, their mean
    power, the least memory, link, fp8 and capability, and the largest error. All other fields come
    from the card with the lowest bf16 peak. cards: one for each rank."""
    kinds = [*dict.fromkeys(cards)]
    if len(kinds) == 1:
        return kinds[0]
    least = {name: min(getattr(c, name) for c in kinds) for name in ("memory", "link", "fp8")}
    powers = [card.power for card in cards]
    return replace(
        min(kinds, key=lambda card: card.bf16),
        name=" and ".join(card.name for card in kinds),
        capability=min(card.capability for card in kinds),
        source="; ".join(f"{card.name}: {card.source}" for card in kinds),
        error=max((card.error for card in kinds if card.error is not None), default=None),
        measured=None,
        power=None if None in powers else round(sum(powers) / len(powers)),
        **least,
    )


def cards_here(specs: Sequence[DeviceSpec]) -> tuple[Card, ...]:
    """Return a card for each rank if the GPUs differ, else (). A card has the rates measured on one
    GPU of its kind."""
    differ = len({spec.name for spec in specs}) > 1
    return tuple(rig_card(card_of(spec), 1) for spec in specs) if differ else ()


def card_here(spec: DeviceSpec, gpus: int, *, cuda: bool) -> Card:
    """Return the card of this machine's devices, with measured rates if they are GPUs and have a
    card file."""
    card = card_of(spec)
    return rig_card(card, gpus) if cuda else card


def rig_card(card: Card, gpus: int) -> Card:
    """Return the card with rates measured on this machine, else with rates of a shared rig, else
    the unchanged card. A damaged or foreign file causes a warning. gpus: number of GPUs. The file
    measured with the fewest GPUs, but at least this number, counts; else the file measured with the
    most GPUs."""
    own = _files(card, folder(), this_host())
    found = own or _files(card, SHARED, "*")
    if not found:
        return card
    enough = [count for count in found if count >= gpus]
    return _measured(card, found[min(enough) if enough else max(found)], own=bool(own))


def _files(card: Card, place: Path, host: str) -> dict[int, CardFile]:
    """The newest card file for each number of GPUs of this card. host: name of the machine; "*":
    any machine."""
    pattern = path_of(card.driver_name, 0, "HOST").name.replace("_x0_HOST", f"_x*_{host}")
    found: dict[int, CardFile] = {}
    for path in sorted(place.glob(pattern)):
        try:
            file = read_card_file(path)
        except ConfigError as error:
            warn_once(f"{error}: it is ignored; `llmq rig` writes it anew")
            continue
        if path_of(file.device, file.gpus, file.host).name != path.name:
            warn_once(f"'{path}' holds another rig ({file.gpus} {file.device}): it is ignored")
        elif abs(file.memory - card.memory * GIB) < SIBLING * file.memory:
            found[file.gpus] = max(file, found.get(file.gpus, file), key=lambda file: file.date)
    return found
