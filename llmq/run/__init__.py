"""The trainer: ranks and their threads, the training loop, and the loop's console output and log.

This package may import packages of lower layers, from base to plan. Begin to read with `trainer.py`
and `loop.py`.
"""
