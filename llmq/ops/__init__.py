"""Launchers: each module computes the grids of one operation's kernels and launches the kernels.

CUDA sources are in `cu/`, NumPy references in `ref/`. A `Kernel` declares dtypes, shapes and limits
of its arguments (`llmq/runtime/declaration.py`); launcher and reference take arguments of the same
names. A launch raises TypeError for a wrong dtype and ValueError for a wrong shape; docstrings list
other errors. This package imports base and runtime. Start with `pointwise/elementwise.py`.
"""
