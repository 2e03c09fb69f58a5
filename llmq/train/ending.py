"""Whether a run is to end before its last step, and what several processes agree on for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmq.base.signals import FirstSignal
from llmq.runtime.processes import processes
from llmq.train.agreement import Agreement
from llmq.train.requests import Requests


class Ending:
    """Of one run. With one process what it sees counts at once; several act on what they agreed on.

    requests: what asks for a checkpoint or for the end, beside ending signals.
    """

    def __init__(self, requests: Requests):
        self.requests = requests
        self._first = FirstSignal()
        self._agreement = Agreement() if processes().count > 1 else None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals during the block."""
        with self._first, self.requests.signal:
            yield

    @property
    def signum(self) -> int | None:
        """The signal that asks the run to end, if one came: to any process, as of `agree`."""
        return self._first.signum if self._agreement is None else self._agreement.signum

    @property
    def ends(self) -> bool:
        """Whether the run is to end: by a signal or --max-hours."""
        if self._agreement is None:
            return self.seen_here()
        return self.signum is not None or self._agreement.over

    def seen_here(self) -> bool:
        """Whether this process sees a reason for the run to end."""
        return self._first.signum is not None or self.requests.for_end()

    def agree(self, *, asks: bool = False) -> str | None:
        """Exchange with other processes what each may see alone. Between any two steps.

        asks: look also for what asks for a checkpoint; it is returned, whichever process saw it.
        """
        asked = self.requests.for_checkpoint() if asks else None
        if self._agreement is None:
            return asked
        return self._agreement.exchange(self._first.signum, self.requests.for_end(), asked)
