"""The one thing of all this that an ordinary training run looks at."""

TUNING = "FLEETBENCH_TUNING"
"""Environment variable with the tuning directory; set by ``fleetbench profile -- COMMAND`` and ``tune -- COMMAND``."""
