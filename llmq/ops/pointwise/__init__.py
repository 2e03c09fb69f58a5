"""Norms, activations, embeddings, and operations on each element or column alone: launchers."""
