"""The computation of a step, in order: embedding, transformer blocks, head, their matrix products
and number formats.

The folder imports base, runtime, ops, config and state.
Start with `step.py`, then `block.py`.
"""
