"""Measurements: how fast configurations are, and whether options change any bit.

Imports everything below: base to train.
Start with `measure.py`, which times one run, and `bench.py`, which makes many.
"""
