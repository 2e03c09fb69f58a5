"""References of causal attention, norms and RoPE of heads, and gates."""
