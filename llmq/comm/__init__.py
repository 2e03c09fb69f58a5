"""Collectives between ranks: threads of the CPU, NCCL, copy engines, host memory between them.

Imports base and runtime.
Start with `collectives.py`, then `connect.py`.
"""
