"""Measuring a machine: `llmq rig`, its report, and the card file that plans take their rates from.

Imports everything below: base to bench.
Start with `rig.py`.
"""
