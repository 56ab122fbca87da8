"""Elastic local steps: workers that come and go, on torchft's manager; only this package imports torchft."""
