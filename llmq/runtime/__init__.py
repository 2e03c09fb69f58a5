"""The machine: devices, memory, kernels, graphs, streams and threads, without models.

Start with `device.py`, the interface that the training step sees.
"""
