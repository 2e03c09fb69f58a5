"""One module an operation: grid and launch. Kernels are in `cu/`, their meaning in `ref/`.

A `Kernel` declares dtypes, shapes and limits of its arguments (`llmq/runtime/declaration.py`). The
launcher and the reference take them under the same names. A launch raises TypeError for a wrong
dtype and ValueError for a wrong shape; docstrings say what is raised beside. Imports base and
runtime. Start with `elementwise.py`, then `norm.py`.
"""
