"""References of matrix products with epilogues, and of low-rank adapters."""
