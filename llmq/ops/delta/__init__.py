"""Gated delta nets: the rule, its gates, the convolution before and the norm behind."""
