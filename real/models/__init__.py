"""The registry's models."""
