"""Legs of a script that does not know fleetbench."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import ForkedLaunches

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from real.job.script_session import ScriptSession
from real.leg import Leg

SCRIPT = Path(__file__).with_name("driven_loops.py")


@pytest.mark.sample(2)
@pytest.mark.parametrize("loop", ["Plain", "Closure", "Manual", "Accumulate"])
def test_legs_of_a_plain_script(loop: str, forked_launches: ForkedLaunches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default arm is what it gives to DistributedDataParallel; strategies change in the living process, and layers are measured."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "fleetbench", "launch", "--nproc", "2", str(SCRIPT), loop]
    with ScriptSession(command, Experiment(name="mine")) as session:
        own = session.experiment.strategy
        assert own.changes().keys() <= {"fusion", "fuse_grad_size_in_MB", "sync_nccl_allreduce", "thread_num"}
        assert own.fuse_grad_size_in_MB == pytest.approx(0.0005, rel=0.01)
        (note,) = (note for note in session.notes if "DistributedDataParallel" in note)
        assert "gradient_as_bucket_view=False" in note
        local = DistributedStrategy.from_dict({"localsgd": True, "localsgd_configs": {"k_steps": 2}})
        runs = [session.run(Leg(strategy=strategy, steps=6, warmup_steps=2)) for strategy in (own, local)]
        assert [run.summary.steps for run in runs] == [6, 6]
        assert all(run.summary.step_s["mean"] > 0 for run in runs)
        parts = session.run_profile(Leg(strategy=own, steps=4, warmup_steps=3, profile=True))
    assert len(parts) == 2
    assert {"module.body.0", "module.body.1", "module.last"} <= {*parts[0]["layers"]["layers"]}
    assert len(forked_launches.started) == 1, "one launch has carried all legs"
