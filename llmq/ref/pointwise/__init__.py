"""References of norms, activations, embeddings, and operations on each element or column alone."""
