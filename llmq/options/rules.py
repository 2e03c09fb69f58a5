"""Table of all rules, in the order in which errors and warnings are reported."""

from llmq.options.groups.batch import BATCH_RULES
from llmq.options.groups.data import DATA_RULES
from llmq.options.groups.memory import MEMORY_RULES
from llmq.options.groups.model import MODEL_RULES
from llmq.options.groups.optim import OPTIM_RULES
from llmq.options.groups.parallel import PARALLEL_RULES
from llmq.options.groups.precision import PRECISION_RULES
from llmq.options.groups.rl import RL_RULES
from llmq.options.groups.run import RUN_RULES
from llmq.options.rule import Rules
from llmq.options.savers import SAME_BITS, SAVERS

# Implied values come after the values they depend on: batch sizes and formats before the chunks of
# the logits, and parameters of the loss before its other ones.
RULES = Rules(
    (
        *BATCH_RULES,
        *MODEL_RULES,
        *PRECISION_RULES,
        *RL_RULES,
        *OPTIM_RULES,
        *DATA_RULES,
        *MEMORY_RULES,
        *PARALLEL_RULES,
        *RUN_RULES,
        *SAVERS,
        *SAME_BITS,
    )
)
"""The rules of all options."""
