"""How much longer the library's backward of attention takes where its heads are in parts.

A block of its kernel computes the gradients of KEY_BLOCK keys of a head, and walks over all queries
from there on; the blocks of a head go from the longest to the shortest. Every multiprocessor has
one at a time. A short one follows a long one, so that a multiprocessor computes two of them in the
time of the longest, which is the unit here: a call takes a whole number of units, and waits for the
last of its blocks. In one call for all heads the next ones fill what one leaves idle.
"""

from __future__ import annotations

import math

from llmq.runtime.cost import Cost
from llmq.runtime.head_groups import head_groups

# Constants of cuDNN 9.19 on an H100; what they give is within 10 % of what
# tests/test_small_grids.py has.
KEY_BLOCK = 128
LAST_BLOCKS = 0.22  # units that a call waits for its last ones, in the mean


def small_grids(cost: Cost, num_sms: int, beside: int) -> float:
    """How many times as long as undivided; 1 for all that is not the library's backward.

    beside: so many positions a query costs beside those that it sees, undivided.
    """
    if cost.heads is None or cost.heads.parts == 1:
        return 1.0
    batch, num_heads, num_kv_heads, parts = cost.heads
    seq_len = cost.kind.sizes[1]
    head = batch * seq_len / (2 * KEY_BLOCK * num_sms)  # units of work in a head
    groups = head_groups(num_heads, num_kv_heads, parts)
    divided = sum(math.ceil(head * group.count) + LAST_BLOCKS for group in groups)
    return max(divided / (head * num_heads * (1 + beside / seq_len)), 1.0)
