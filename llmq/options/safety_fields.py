"""Options about runs that diverge, and about when a run is written to the disk beside its steps."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.options.option_types import option, switch
from llmq.options.rank_fields import RankFields

_GROUP = "Keeping a run"


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False, eq=False)
class SafetyFields(RankFields):
    """RankFields, and those that keep what a run has reached."""

    guard: str = option(
        _GROUP,
        "warn",
        "What follows a step whose loss or gradient norm is far above what is usual; warn: a line, "
        "skip: no update, rollback: no update, and where that does not help back to the newest "
        "good checkpoint, past the data since then; off: nothing",
        choices=("off", "warn", "skip", "rollback"),
    )
    guard_recovery: int = option(
        _GROUP,
        100,
        "Steps after a rollback over which the learning rate rises again, from a tenth",
        min=0,
    )
    ckpt_every_minutes: float = option(
        _GROUP, 0.0, "Minutes without a checkpoint after which one is written, too; 0: any", min=0
    )
    ckpt_background: bool = switch(
        _GROUP,
        "Write checkpoints while training goes on, from a copy of the state in host memory, which "
        "takes as much of it as a checkpoint of the disk",
    )
    max_hours: float = option(
        _GROUP,
        0.0,
        "End, with a checkpoint that is complete by then, after so many hours, with exit status "
        "75; 0: never",
        min=0,
    )
    force: bool = switch(_GROUP, "Export the model also where it computes infinities or NaNs")
