"""Training state kept between micro-steps: weights, codes, gradients, moments, and their table.

Start with `params.py`, the weight table, then `placement.py`.
"""
