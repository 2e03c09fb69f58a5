"""`--layers-per-step`: a step trains only a few blocks, in turns (LISA, arXiv 2403.17919).

All steps of a period train the same blocks, drawn from the seed and the number of the period, and
all parameters outside of blocks. Gradients and moments of the drawn blocks reuse the memory of the
last period's blocks. The moments of all slabs begin at zero in each period.
"""

from collections.abc import Iterable

import numpy as np

from llmq.options.groups.optim import OptimOptions
from llmq.state.params import Slab


def period_of(optim: OptimOptions, step: int) -> int:
    """Return the number of the period to which a step, counted from 0, belongs; always 0 if all
    steps train all blocks."""
    return step // optim.layers_period if optim.layers_per_step else 0


def still_blocks(optim: OptimOptions, table: Iterable[Slab], step: int) -> set[str]:
    """Return the names of the blocks that a step, counted from 0, does not train."""
    blocks = [slab.name for slab in table if slab.is_block]
    if not optim.layers_per_step:
        return set()
    rng = np.random.default_rng((optim.seed & 0xFFFFFFFF, period_of(optim, step)))
    drawn = rng.choice(len(blocks), optim.layers_per_step, replace=False)
    return set(blocks) - {blocks[i] for i in drawn}
