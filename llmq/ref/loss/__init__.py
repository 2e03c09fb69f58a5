"""References of losses of logits, fused with their gradients."""
