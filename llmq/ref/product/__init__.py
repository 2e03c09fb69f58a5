"""Matrix products, with what follows them, and low-rank adapters of their rows: references."""
