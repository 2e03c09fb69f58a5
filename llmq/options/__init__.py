"""The description of a run: its options, presets of models, cards and their speeds.

Imports base, runtime and arch.
Start with `options.py` and `rules.py`.
"""
