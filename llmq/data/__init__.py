"""From text to token files to batches.

Imports base, the options of config, and the cache folder of runtime.
Start with `tokens.py` and `loader.py`; `packing.py` and `epoch_plan.py` say what a sequence is.
"""
