"""Two in flight: queues of two messages each worked out by hand, and the two numbers found again."""

from __future__ import annotations

import pytest

from fleetbench.fitting.overlap import Together, durations, fit_together


@pytest.mark.parametrize(
    ("queues", "alpha_s", "latency", "transfer", "expected"),
    [
        ([[4.0], [4.0]], 0.0, 2.0, 1.0, [[6.0], [8.0]]),  # a link that both share, until 2, 4, 6 and 8
        ([[4.0], [4.0]], 0.0, 2.0, 2.0, [[4.0], [4.0]]),
        ([[4.0], [2.0]], 0.0, 2.0, 1.0, [[5.0], [6.0]]),  # until 2, 3, 5 and 6
        ([[4.0], []], 1.0, 1.0, 1.0, [[5.0], []]),
        ([[1.0], [4.0]], 1.0, 2.0, 1.0, [[3.5], [5.5]]),  # until 0.5, 2.5, 3 and 5, and half a second of latency after each
        ([[1.0], [1.0]], 1.0, 1.0, 2.0, [[3.0], [3.0]]),  # latencies share, messages do not
        ([[1.0, 1.0], [4.0]], 1.0, 2.0, 1.0, [[3.5, 3.5], [5.5]]),  # the third, from 3.5 on, until 5.5 and 6.5
    ],
)
def test_queues_by_hand(queues: list[list[float]], alpha_s: float, latency: float, transfer: float, expected: list[list[float]]) -> None:
    """Only what both do at once is shared."""
    found, _ = durations(queues, alpha_s, Together(latency=latency, transfer=transfer))
    assert found == [pytest.approx(lane) for lane in expected]


@pytest.mark.parametrize(("latency", "transfer"), [(2.0, 1.0), (0.6, 1.5), (1.4, 0.4)])
def test_both_are_found_again_from_one_queue(latency: float, transfer: float) -> None:
    """Two under way of nine, of which the first two are not known, within 2 %."""
    queue = [3.0, 2.0, 0.1, 2.0, 0.1, 0.2, 2.5, 1.0, 0.3]
    took, _ = durations([queue], 0.5, Together(latency=latency, transfer=transfer), depth=2)
    found = fit_together([queue], 0.5, [[None, None, *took[0][2:]]], depth=2)
    assert found.latency == pytest.approx(latency, rel=0.02)
    assert found.transfer == pytest.approx(transfer, rel=0.02)


@pytest.mark.parametrize(("latency", "transfer"), [(2.0, 1.0), (1.0, 1.0), (0.6, 1.5), (1.4, 0.4), (1.9, 1.9)])
def test_both_are_found_again(latency: float, transfer: float) -> None:
    """From what the members of two uneven queues took, but for each queue's first, within 2 %."""
    queues = [[3.0, 0.1, 2.0, 0.2, 1.0], [2.0, 0.1, 0.1, 2.5]]
    took, _ = durations(queues, 0.5, Together(latency=latency, transfer=transfer))
    known = [[None, *lane[1:]] for lane in took]
    found = fit_together(queues, 0.5, known)
    assert found.latency == pytest.approx(latency, rel=0.02)
    assert found.transfer == pytest.approx(transfer, rel=0.02)
