"""`llmq rig`: measures a machine, writes a report, and writes the card file with rates for plans.

This folder imports all folders below, from base to bench. Begin to read with `rig.py`.
"""
