"""`llmq rig`: measures a machine, writes a report, and writes the card file with rates for plans.

This package may import packages of lower layers, from base to bench. Begin to read with `rig.py`.
"""
