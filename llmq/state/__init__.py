"""State that training keeps between micro-steps: weights, codes, gradients, moments, and their
table.

Imports base, runtime, ops, model.arch and config.
Start with `params.py`, the weight table, then `placement.py`.
"""
