"""What the real executor's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zero_trainer import ZeroTrainer


@pytest.fixture
def others() -> Iterator[ZeroTrainer]:
    """Another trainer that takes 5 ms for a collective."""
    fake = ZeroTrainer(0.005)
    yield fake
    fake.close()
