"""Small types and helpers that every room shares: errors, number formats, tensors, atomic files.

Imports nothing of llmq.
Start with `tensor.py` and `operand.py`.
"""
