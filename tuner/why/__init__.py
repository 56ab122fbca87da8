"""Why a script is slow: looks at it as it is (``explaining``), names causes, simulates each remedy and tries what the living script can."""
