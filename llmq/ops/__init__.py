"""One module an operation: checks, grid and launch. Kernels are in `cu/`, their meaning in `ref/`.

Each raises TypeError for a wrong dtype and ValueError for a wrong shape; docstrings say what it
raises beside. Imports base and runtime.
Start with `elementwise.py`, then `norm.py`.
"""
