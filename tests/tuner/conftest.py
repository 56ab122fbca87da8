"""What the tuner's tests rely on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search space must not depend on the machine that tests it."""
    monkeypatch.setattr("tuner.space.os.cpu_count", lambda: 64)
