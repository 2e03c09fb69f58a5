"""What a run is: model configuration, presets, the options of a run, cards and their speeds.

Imports base, runtime and model.arch.
Start with `model.py` and `fields.py`.
"""
