"""Kinds of memory, and what of a machine reaches each: the one place that knows."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of memory.

    name: in options, plans and tables. on_host: whether it is beside the device, behind the bus, so
    that an update moves what lies in it. direct: whether kernels and collectives work in it where
    it lies; else they are refused, and only copies reach it. in_ram: whether its bytes are the
    machine's memory. cached: whether the CPU reads it as fast as other memory.
    """

    name: str
    on_host: bool = True
    direct: bool = True
    in_ram: bool = True
    cached: bool = True

    def memory(self, nbytes: int) -> np.ndarray:
        """Bytes of this kind, uint8 (nbytes,), of a device that is the CPU."""
        return np.empty(nbytes, np.uint8)


DEVICE = Tier("device", on_host=False, in_ram=False)
PINNED = Tier("pinned")
WRITE_COMBINED = Tier("write_combined", cached=False)  # fast for GPUs
TIERS = {tier.name: tier for tier in (DEVICE, PINNED, WRITE_COMBINED)}
"""By name. A device has an arena in each, and its stack in its own memory."""


def host_tiers() -> list[str]:
    """The names of those beside the device."""
    return [name for name, tier in TIERS.items() if tier.on_host]
