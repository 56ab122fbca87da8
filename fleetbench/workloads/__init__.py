"""Models and data of the registry, with torch, for real runs and virtual trainers."""
