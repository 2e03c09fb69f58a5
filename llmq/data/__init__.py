"""From token files to batches.

This room may import base, and the option groups of data and batches. Code that knows text or
tokenizers is in the room text. Start with `tokens.py` and `loader.py`; `packing.py` and
`epoch_plan.py` define sequences and their order.
"""
