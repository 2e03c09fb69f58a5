"""What the driver says of errors of the GPUs, to a process that does not compute with them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

MOST = 100  # errors of one GPU that are listed


class GpuErrors:
    """Of all GPUs of the machine, since it was made; of none where NVML cannot be used."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: list[tuple[Any, Any, int]] = []  # handle, its errors, memory errors so far
        with suppress(Exception):  # no module, no library, no driver: each its own class
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                self._gpus.append((handle, self._listen(handle), self._uncorrected(handle)))

    def _listen(self, handle: Any) -> Any:
        with suppress(Exception):  # of a GPU that cannot tell
            events = self._nvml.nvmlEventSetCreate()
            kind = self._nvml.nvmlEventTypeXidCriticalError
            self._nvml.nvmlDeviceRegisterEvents(handle, kind, events)
            return events
        return None

    def _uncorrected(self, handle: Any) -> int:
        with suppress(Exception):
            kinds = (self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self._nvml.NVML_VOLATILE_ECC)
            return int(self._nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))
        return 0

    def new(self) -> list[str]:
        """In words, since this was last called: the driver's errors (Xid), and those of memory."""
        found = []
        for index, (handle, events, before) in enumerate(self._gpus):
            for xid in dict.fromkeys(self._xids(events)):
                found.append(f"GPU {index}: the driver says Xid {xid}")
            now = self._uncorrected(handle)
            if now > before:
                found.append(f"GPU {index}: {now - before} uncorrectable memory errors (ECC)")
            self._gpus[index] = (handle, events, now)
        return found

    def _xids(self, events: Any) -> list[int]:
        found: list[int] = []
        with suppress(Exception):  # there are no more
            while events is not None and len(found) < MOST:
                found.append(int(self._nvml.nvmlEventSetWait_v2(events, 0).eventData))
        return found
