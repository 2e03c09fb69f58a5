"""Launchers of causal attention, of norms and RoPE of heads, and of gates."""
