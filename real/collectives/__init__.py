"""A benchmark of the collectives themselves."""
