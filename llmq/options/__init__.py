"""What a run is: its options, presets of models, cards and their speeds.

Imports base, runtime and arch.
Start with `options.py` and `rules.py`.
"""
