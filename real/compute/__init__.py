"""Changes to one trainer's compute: precision, recompute, compilation, batch norm, injected stragglers."""
