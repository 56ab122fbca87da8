"""How one trainer computes: precision, recompute, compilation, batch norm, injected stragglers."""
