"""The package has small types and helpers for all packages of llmq: errors, dtypes, tensors, atomic
files.

Modules here import no other package of llmq. Start with `tensor.py` and `operand.py`.
"""
