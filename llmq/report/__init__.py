"""Reports of a run or of many runs: the log, the live view, plots, tables, TensorBoard and W&B.

Imports base and runtime. This package knows records and rows, and nothing of training. Start with
`json_log.py`, the log that all other modules show.
"""
