"""Checkpoints, and model directories in Hugging Face's format.

Imports everything below: base to model.
Start with `checkpoint.py` and `hf.py`.
"""
