from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import training_problem as problem
from alone import AloneMeeting

from fleetbench.errors import ConfigError
from fleetbench.recommended import VARIABLE, keep
from fleetbench.strategy import DistributedStrategy
from real.collective import model_key, recommended, refuse_beside_auto
from real.job.launcher import launch_script

CPU = torch.device("cpu")
SCRIPT = """
import sys
import numpy as np
import training_problem as problem
from torch.nn.functional import cross_entropy
from fleetbench import DistributedStrategy, fleet

fleet.init(DistributedStrategy(auto=True), timeout_s=30)
model = fleet.distributed_model(problem.model("float64"))
optimizer = fleet.distributed_optimizer(problem.optimizer_of("momentum")(model))
for step in range(1, problem.STEPS + 1):
    problem.decay(optimizer, step)
    inputs, labels = problem.own_batch(step, fleet.worker_index(), fleet.worker_num(), "float64")
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
fleet.synchronize()
np.savez(f"{sys.argv[1]}.{fleet.worker_index()}.npz", parameters=problem.flat(model).numpy(), places=fleet.worker_endpoints())
"""


def test_the_model_and_its_trainers_are_the_key(tmp_path: Path) -> None:
    """What was stored for this model is found; a frozen layer is another model."""
    model = problem.model("float32", "normed")
    key = model_key(model, trainers=1, trainers_per_node=1, device=CPU)
    keep(tmp_path, key, DistributedStrategy(nccl_comm_num=2), "USE nccl_comm_num = 2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path))
        assert recommended(problem.model("float32", "normed"), AloneMeeting(), CPU, 1) == DistributedStrategy(nccl_comm_num=2)
        next(model.parameters()).requires_grad_(False)  # torch's signature
        with pytest.raises(ConfigError, match="no recommendation for this model"):
            recommended(model, AloneMeeting(), CPU, 1)


def test_other_fields_beside_auto_are_refused() -> None:
    """They would be chosen twice."""
    refuse_beside_auto(DistributedStrategy(auto=True))
    with pytest.raises(ConfigError, match="nccl_comm_num"):
        refuse_beside_auto(DistributedStrategy(auto=True, nccl_comm_num=2))


@pytest.mark.slow
def test_a_script_trains_by_what_is_stored(tmp_path: Path) -> None:
    """Launched on two ranks, of which only rank 0 need see the folder, ``auto`` trains as the stored Local SGD, written out."""
    model = problem.model("float64")
    key = model_key(model, trainers=2, trainers_per_node=2, device=CPU)
    stored = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 7})  # type: ignore[arg-type]  # tables are decoded
    keep(tmp_path / "stored", key, stored, "USE localsgd = true")
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"os.environ[{VARIABLE!r}] = {str(tmp_path / 'stored')!r} if os.environ['RANK'] == '0' else 'nowhere'\n{SCRIPT}"
    )
    launch_script(2, [str(script), str(tmp_path / "out")], log_dir=tmp_path / "log")
    schedule = problem.Schedule({1, 8, problem.STEPS})
    expected = problem.local_training(2, "float64", problem.optimizer_of("momentum"), schedule)[0, -1].numpy()
    for rank in range(2):
        found = np.load(tmp_path / f"out.{rank}.npz")
        np.testing.assert_allclose(found["parameters"], expected, rtol=0, atol=1e-12)
        assert [place.rpartition(":")[2] for place in found["places"]] == ["0", "1"]
    assert "localsgd" in (tmp_path / "log" / "workerlog.0").read_text()
