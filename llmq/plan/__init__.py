"""Plans: memory and speed of a run, from the real step on a device that only counts.

Imports everything below: base to checkpoint. Start with `plan.py`, then `cost.py`.
"""
