"""What a script sees of its DistributedDataParallel that is attached, by the command and the import hook that users have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import run_python

from fleetbench.cli.main import main
from real.processes.attached import FOUR_LINES

SEEN = """
import copy, inspect, io, pickle, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel as Ddp
import torch.nn.parallel.distributed as home

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1, timeout=timedelta(minutes=7))
assert Ddp is home.DistributedDataParallel is nn.parallel.DistributedDataParallel
assert (Ddp.__name__, Ddp.__module__) == ("DistributedDataParallel", "torch.nn.parallel.distributed")
assert "bucket_cap_mb" in inspect.signature(Ddp).parameters
assert pickle.loads(pickle.dumps(Ddp)) is Ddp
ddp = Ddp(nn.Linear(2, 2))
keys = list(ddp.state_dict())
with torch.no_grad():
    ddp(torch.ones(1, 2))
ddp(torch.ones(1, 2)).sum().backward()
assert isinstance(ddp.reducer, dist.Reducer), "without an optimizer it is torch's"
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
ddp(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert not isinstance(ddp.reducer, dist.Reducer), "it is attached"
assert isinstance(ddp, Ddp) and type(ddp.module) is nn.Linear and not hasattr(ddp.module, "module")
assert list(ddp.state_dict()) == keys == ["module.weight", "module.bias"]
assert ddp.training and ddp.require_backward_grad_sync
with ddp.no_sync():
    assert not ddp.require_backward_grad_sync
with ddp.join():
    ddp(torch.ones(1, 2)).sum().backward()
    optimizer.step()
for call in (lambda: Join([ddp]).__enter__(), lambda: ddp.register_comm_hook(None, print)):
    try:
        call()
    except Exception as error:
        print("REFUSED", type(error).__name__, str(error).splitlines()[0])
    else:
        raise AssertionError("is not refused")
copied = copy.deepcopy(ddp)
saved = io.BytesIO()
torch.save(ddp, saved)
saved.seek(0)
for other in (copied, torch.load(saved, weights_only=False)):
    assert isinstance(other.reducer, dist.Reducer) and not other.is_attached, "is torch's own again"
    assert torch.equal(other.module.weight, ddp.module.weight)
from fleetbench import fleet
print("TIMEOUT", fleet.job.communicators._timeout)
"""
REFUSED = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Ddp
from real.attach.settings import not_expressed, own_strategy, refuse_settings

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

def ddp(**named):
    return Ddp(nn.Linear(2, 2), **named)

hooked, ignoring = ddp(), nn.Linear(2, 2)
compressed = ddp(bucket_cap_mb=3, find_unused_parameters=True)
compressed.broadcast_buffers = False
hooked.register_comm_hook(PowerSGDState(None), powerSGD_hook)
compressed.register_comm_hook(None, fp16_compress_hook)
Ddp._set_params_and_buffers_to_ignore_for_model(ignoring, ["bias"])
for model in (ddp(process_group=dist.new_group([0])), hooked, Ddp(ignoring)):
    try:
        refuse_settings(model)
    except Exception as error:
        print(str(error).splitlines()[0])
    else:
        raise AssertionError("is not refused")
for model in (ddp(), compressed):
    refuse_settings(model)
own = own_strategy(compressed)
assert own.changes() == {"fusion": "ddp", "fuse_grad_size_in_MB": 3.0, "sync_nccl_allreduce": False, "find_unused_parameters": True,
                         "broadcast_buffers": False, "fp16_allreduce": True} | (
{"thread_num": torch.get_num_threads()} if torch.get_num_threads() > 1 else {})
static = own_strategy(ddp(static_graph=True, find_unused_parameters=True))
assert static.static_graph and not static.find_unused_parameters
print(*not_expressed(ddp(gradient_as_bucket_view=False)))
"""
BOTH = """
import sys
import torch, torch.distributed as dist
from torch import nn
from fleetbench import fleet

fleet.init()
model = fleet.distributed_model(nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
try:
    nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()
except Exception as error:
    print("REFUSED", str(error).splitlines()[0])
"""


def test_the_four_lines_beside_the_wrapper_stay_refused(tmp_path: Path) -> None:
    """The job leaves such a script alone, and both would exchange gradients."""
    (tmp_path / "both.py").write_text(BOTH)
    (tmp_path / "strategy.toml").write_text("")
    (tmp_path / "job").mkdir()
    arguments = ["0", "1", tmp_path / "store", tmp_path / "out", tmp_path / "job", tmp_path / "strategy.toml", tmp_path / "both.py"]
    ended = run_python([Path(__file__).with_name("attached.py"), *arguments], tmp_path)
    assert "REFUSED DistributedDataParallel(...) around the model: exchanges gradients" in ended.out
    assert (tmp_path / "job" / "unattached").read_text() == FOUR_LINES


def test_a_script_sees_a_distributed_data_parallel(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Class, names, keys, contexts, copies and files are torch's; what would be wrong is refused; the timeout is the script's."""
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "strategy.toml").write_text("fuse_grad_size_in_MB = 2\n")
    command = [sys.executable, str(tmp_path / "seen.py"), str(tmp_path / "store")]
    code = main(["launch", "--strategy", str(tmp_path / "strategy.toml"), "--", *command])
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "REFUSED ConfigError Join: joins uneven inputs of several objects at once" in said.out
    assert "REFUSED ConfigError register_comm_hook: comes after the first forward" in said.out
    assert "TIMEOUT 0:07:00" in said.out
    assert "fuse_grad_size_in_MB   2.0" in said.err


def test_settings_that_change_training_are_refused_by_name(tmp_path: Path) -> None:
    """Others are fields of the script's own strategy, or in a note."""
    (tmp_path / "refused.py").write_text(REFUSED)
    ended = run_python([tmp_path / "refused.py", tmp_path / "store"], tmp_path)
    assert ended.code == 0, ended.out
    for name in ("a process group of its own", "the communication hook powerSGD_hook", "parameters to ignore"):
        assert f"training would differ silently (got {name})" in ended.out
    assert "DistributedDataParallel: gradient_as_bucket_view=False" in ended.out
