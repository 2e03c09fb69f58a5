"""Training state kept between micro-steps: weights, fp8 and int8 codes, gradients, moments, and the
weight table.

Start with `params.py`, the weight table, then `placement.py`.
"""
