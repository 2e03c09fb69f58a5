"""The keys that queries see: the same for all of attention's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.base.dtypes import I32
from llmq.base.tensor import Tensor
from llmq.runtime.kernel import expect


def sees_all_before(window: int | None, seq_len: int) -> bool:
    """Whether a window, None without one, hides no key of a sequence."""
    return window is None or window >= seq_len


@dataclass(frozen=True, slots=True)
class Sight:
    """The keys up to their own that queries see, for all of attention's kernels.

    starts: I32 (B, T), the first position of the document of each, None: all are of one. They
    never fall along a row. window: how many keys, the query's own included; None: all.
    """

    starts: Tensor | None = None
    window: int | None = None

    def within(self, op: str, batch: int, seq_len: int, backends: tuple[str, ...]) -> Sight:
        """Without a window that every query's keys fit into. TypeError or ValueError if wrong."""
        if self.starts is not None:
            expect(op, "starts", self.starts, I32, (batch, seq_len))
            if "cudnn" in backends:
                raise ValueError(f"{op}: the cudnn backend knows no documents within a sequence")
        if self.window is not None and self.window < 1:
            raise ValueError(f"{op}: window must be at least 1, got {self.window}")
        whole = sees_all_before(self.window, seq_len)
        return Sight(self.starts, None if whole else self.window)

    @property
    def masked(self) -> bool:
        """Whether there is more to it than that keys come before their query."""
        return self.starts is not None or self.window is not None

    def args(self, seq_len: int) -> tuple[Tensor | None, int]:
        """For kernels."""
        return self.starts, seq_len if self.window is None else self.window

    def rows(self, start: int, stop: int) -> Sight:
        """The sight of these sequences of the batch."""
        return Sight(None if self.starts is None else self.starts.rows(start, stop), self.window)

    def pairs(self, seq_len: int) -> int:
        """Twice the pairs of query and key, where a query's own key counts half.

        Pairs that documents hide are not known here, and not taken off.
        """
        window = seq_len if self.window is None else self.window
        return window * (2 * seq_len - window)


ALL = Sight()
"""Every query sees all keys up to its own."""
