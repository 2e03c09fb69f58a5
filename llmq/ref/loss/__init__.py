"""Losses of logits, fused with their gradients: references."""
