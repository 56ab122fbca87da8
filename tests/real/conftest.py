"""What the real executor's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import processes
import pytest
from processes import ForkedLaunches
from zero_trainer import ZeroTrainer


@pytest.fixture
def others() -> Iterator[ZeroTrainer]:
    """Another trainer that takes 5 ms for a collective."""
    fake = ZeroTrainer(0.005)
    yield fake
    fake.close()


@pytest.fixture
def forked_launches() -> Iterator[ForkedLaunches]:
    """See ``processes.forked_launches``; that ranks of a script are processes, other tests show."""
    with processes.forked_launches() as forks:
        yield forks
