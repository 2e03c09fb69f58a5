"""Reports of a run or of many runs: the log, the live view, plots, tables, TensorBoard and W&B.

This package imports base and runtime. It knows records and rows, and nothing of training. Begin to
read with `json_log.py`, the log that all other modules show.
"""
