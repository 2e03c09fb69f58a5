"""The computation of a step, in order: embedding, blocks, head, their products and formats.

Imports base, runtime, ops, config and state.
Start with `step.py`, then `block.py`.
"""
