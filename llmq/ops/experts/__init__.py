"""Routers of experts, rows sorted by expert, and products of such rows: launchers."""
