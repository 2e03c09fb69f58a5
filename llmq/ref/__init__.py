"""The NumPy reference of each operation: its specification, and the CPU device's arithmetic.

Imports base.
Start with `norm.py`.
"""
