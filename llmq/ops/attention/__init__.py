"""Causal attention, and what is done to its queries, keys and output: launchers."""
