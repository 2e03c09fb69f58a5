"""From token files to batches.

Imports base, and from options the options of data. Whatever knows text or tokenizers is in text.
Start with `tokens.py` and `loader.py`; `packing.py` and `epoch_plan.py` say what a sequence is.
"""
