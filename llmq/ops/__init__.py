"""One module an operation: checks, grid and launch. Kernels are in `cu/`, their meaning in `ref/`.

Imports base and runtime.
Start with `elementwise.py`, then `norm.py`.
"""
