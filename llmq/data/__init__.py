"""From text to token files to batches.

Imports base, the cache folder of runtime, and from config the options and where models are.
Start with `tokens.py` and `loader.py`; `packing.py` and `epoch_plan.py` say what a sequence is.
"""
