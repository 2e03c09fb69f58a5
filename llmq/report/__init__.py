"""Everything that is told of a run, or of many: the log, the live view, plots, tables, other
programs' views.

Imports base and runtime. It knows what records and rows look like, and nothing of training.
Start with `json_log.py`, the log that all the others show.
"""
