"""Legs that break in a real script under torchrun: each is named with its rank, nothing is left of it, and the next leg runs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from real.job.launch import started_with
from real.job.script_session import ScriptSession
from real.leg import Leg
from real.processes.diagnosis import LegFailed, LegLost

SCRIPT = Path(__file__).with_name("failing_script.py")
WAYS = (
    (1.0, LegFailed, "rank 1", "ValueError: the third layer is odd"),
    (2.0, LegFailed, "rank 0", "not a number"),  # as on all ranks, after one average
    (3.0, LegFailed, "rank 1", "MemoryError|out of memory|allocate"),
    (4.0, LegLost, "rank 1", "stopped answering at step"),
    (5.0, LegLost, "rank 1", "was killed by SIGKILL at step"),
)
"""Size of a strategy's buckets, which tells the script what to do; what is raised, and what it says."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_leg_that_breaks_is_named_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of its launches lives on; what may be the machine's doing is tried twice, and noted."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    with ScriptSession(command, Experiment.from_dict({"run": {"timeout": "30 s"}})) as session:
        for size, kind, where, says in WAYS:
            session.notes.clear()
            launches = session._num_launches
            with pytest.raises(LegFailed, match=says) as caught:
                session.run(Leg(strategy=DistributedStrategy(fuse_grad_size_in_MB=size), steps=20, warmup_steps=2))
            assert (type(caught.value), caught.value.where) == (kind, where)
            is_tried_again = kind is LegLost
            assert len(session.notes) == is_tried_again
            assert session._num_launches - launches == is_tried_again
            for number in range(1, session._num_launches + 1):
                assert not started_with(session._folder / str(number))
            assert session.run(Leg(steps=10, warmup_steps=2)).summary.steps == 10
        with pytest.raises(LegFailed, match="the loss was inf at step 16, in a leg of layer times") as caught:  # its fourth, after 12
            session.run_profile(Leg(strategy=DistributedStrategy(fuse_grad_size_in_MB=6.0), steps=20, warmup_steps=2, profile=True))
        assert (type(caught.value), caught.value.where) == (LegFailed, "rank 1")
