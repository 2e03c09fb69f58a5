"""Small types and helpers for all rooms: errors, dtypes, tensors, atomic files.

Imports nothing else of llmq. Start with `tensor.py` and `operand.py`.
"""
