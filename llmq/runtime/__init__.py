"""Mechanism: devices, memory, kernels, threads. Nothing here knows what a transformer is."""
