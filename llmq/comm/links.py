"""How each GPU reaches the memory of each other one: what was measured, and what is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmq.base.errors import LlmqError

# A direct copy may be this much slower than staging before staging is taken: what is measured for
# staging is only its two halves, without the waits between them or a shared host memory.
SLOWER = 0.8
# A direct copy that is this much faster than one to or from the host does not take the bus.
BESIDE_BUS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One ordered pair: source writes to reader. GB/s are 10^9 bytes per second.

    access: the driver gives the source access to the reader's memory. correct: a copied pattern
    arrived as it was (None: not tried). direct: GB/s of a direct copy. staged: the slower one of
    source to pinned memory and pinned memory to reader.
    """

    access: bool
    correct: bool | None
    direct: float | None
    staged: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection of one pair: "peer" (direct copies) or "staged", its GB/s, and why not "peer".

    beside_bus: direct copies leave the GPUs' bus to the host alone, as those over NVLink do.
    """

    kind: str
    speed: float
    reason: str | None
    beside_bus: bool = False


def choose(p2p: str, source: int, reader: int, measured: Measured) -> Link:
    """The link from GPU `source` to GPU `reader`; p2p: "auto", "on" or "off".

    Raises LlmqError where "on" asks for what does not work.
    """
    reason = None
    if p2p == "off":
        reason = "off"
    elif not measured.access:
        reason = "no access"
    elif not measured.correct:
        reason = "damaged data"
    elif p2p == "auto" and measured.direct < SLOWER * measured.staged:
        reason = f"slow ({measured.direct:.1f} GB/s)"
    if p2p == "on" and reason == "no access":
        raise LlmqError(
            f"--p2p=on: GPU {source} has no access to the memory of GPU {reader}; use --p2p=auto, "
            "which copies through host memory where it must"
        )
    if p2p == "on" and reason is not None:
        raise LlmqError(
            f"--p2p=on: copies from GPU {source} to GPU {reader} arrive damaged, as an IOMMU can "
            "cause; switch it off in the firmware, or use --p2p=auto"
        )
    if reason is None:
        beside_bus = measured.direct > BESIDE_BUS * measured.staged
        return Link(kind="peer", speed=measured.direct, reason=None, beside_bus=beside_bus)
    return Link(kind="staged", speed=measured.staged, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """gpus: indices by rank. links[reader][source] by rank, None on the diagonal."""

    gpus: list[int]
    links: list[list[Link | None]]

    @property
    def direct(self) -> list[list[bool]]:
        """[reader][source]: whether source writes to reader's memory."""
        return [[link is not None and link.kind == "peer" for link in row] for row in self.links]

    @property
    def has_staged(self) -> bool:
        """Whether any pair goes through host memory."""
        return any(link is not None and link.kind == "staged" for row in self.links for link in row)

    @property
    def beside_bus(self) -> list[list[bool]]:
        """[reader][source]: whether it does so beside the bus."""
        return [[link is not None and link.beside_bus for link in row] for row in self.links]

    @property
    def damaged(self) -> bool:
        """Whether a pair's direct copies arrive damaged; no library may use them either."""
        return any(link and link.reason == "damaged data" for row in self.links for link in row)

    def lines(self) -> list[str]:
        """The table for the console: GB/s, then what is staged and why."""
        head = "[Links] GB/s to (down) from (across), * through host memory"
        lines = [head, "  GPU" + "".join(f"{gpu:>9}" for gpu in self.gpus)]
        reasons: dict[str, list[str]] = {}
        for reader, row in zip(self.gpus, self.links, strict=True):
            cells = []
            for source, link in zip(self.gpus, row, strict=True):
                mark = " "
                if link is not None and link.kind == "staged":
                    mark = "*"
                    reasons.setdefault(link.reason, []).append(f"{source}->{reader}")
                cells.append(f"{'-' if link is None else f'{link.speed:.1f}':>8}{mark}")
            lines.append(f"{reader:>5}{''.join(cells)}".rstrip())
        lines += [f"  * {reason}: {' '.join(pairs)}" for reason, pairs in reasons.items()]
        return lines

    def records(self) -> list[dict[str, Any]]:
        """One record per pair, for the log."""
        return [
            {
                "source": source,
                "reader": reader,
                "kind": link.kind,
                "gb_per_s": round(link.speed, 2),
                "reason": link.reason,
                "beside_bus": link.beside_bus,
            }
            for reader, row in zip(self.gpus, self.links, strict=True)
            for source, link in zip(self.gpus, row, strict=True)
            if link is not None
        ]
