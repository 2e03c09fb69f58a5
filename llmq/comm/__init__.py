"""Collectives between ranks: by CPU threads, NCCL or copy engines, also through host memory.

Start with `collectives.py`, then `connect.py`.
"""
