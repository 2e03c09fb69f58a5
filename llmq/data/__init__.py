"""From text to token files to batches.

Imports base, the cache folder of runtime, and from config where models are.
Start with `tokens.py` and `loader.py`.
"""
