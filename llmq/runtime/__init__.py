"""The machine: devices, memory, kernels, graphs, streams and threads. It knows nothing of models.

Imports base.
Start with `device.py`, the interface that the training step sees.
"""
