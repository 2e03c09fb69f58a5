"""Options of a run, presets of models, and cards with their speeds.

Imports base, runtime and arch. Start with `options.py` and `rules.py`.
"""
