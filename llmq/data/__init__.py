"""From text to token files to batches.

Imports base, and the cache folder of runtime.
Start with `tokens.py` and `loader.py`.
"""
