"""Launchers of norms, activations, embeddings, and operations on single elements or columns."""
