"""``python -m fleetbench``: the same as the ``fleetbench`` command."""

from __future__ import annotations

import sys

from fleetbench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
