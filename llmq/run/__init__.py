"""The trainer: ranks and their threads, the training loop, and what it prints and logs.

Imports everything below: base to plan.
Start with `trainer.py` and `loop.py`.
"""
