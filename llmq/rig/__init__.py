"""`llmq rig`: measurements of a machine, their report, and the card file with the rates of plans.

Imports everything below: base to bench. Start with `rig.py`.
"""
