"""The trainer: ranks and their threads, the training loop, and the loop's console output and log.

This folder imports all folders below, from base to plan. Begin to read with `trainer.py` and
`loop.py`.
"""
