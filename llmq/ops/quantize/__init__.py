"""Launchers of quantization to eight and four bits, with scales."""
