"""Checkpoints, and model directories in Hugging Face's format.

This room may import all rooms below: base to model.
Start with `checkpoint.py` and `hf.py`.
"""
