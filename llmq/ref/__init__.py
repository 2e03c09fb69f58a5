"""NumPy references: the specification of every kernel, and the CPU device's arithmetic."""
