"""Launchers of update rules of parameters, and of the norm of all gradients."""
