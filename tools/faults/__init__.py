"""Machines that try faults on llmq: `python -m tools.faults --help`. Read machine.py first."""

import os

for _library in ("OMP", "OPENBLAS", "MKL"):  # before NumPy is imported: forks have one thread
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
