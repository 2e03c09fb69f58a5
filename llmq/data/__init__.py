"""From text to token files to batches.

Imports base.
Start with `tokens.py` and `loader.py`.
"""
