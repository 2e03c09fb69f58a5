"""Plans say what a run will need and how fast it will be, by the real step on a device that does
nothing.

Imports everything below: base to checkpoint.
Start with `plan.py`, then `cost.py`.
"""
