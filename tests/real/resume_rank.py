"""One rank of the resume tests.

``resume_rank.py RANK RANKS STORE OUTPUT train FOLDER NAMES`` trains every case of these names twice, to its end without a save
and with one, below FOLDER, and once to its save alone, where the model is read. ``... resume FOLDER NAMES`` loads every
case into another model and goes on to the end; and into a third, where the model is read before any step.
``... again FOLDER []`` loads what other trainers have saved.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import training_problem as problem
from resume_cases import CASES, DECAY, EPOCH, OVERFLOW, STEPS, Case, cases
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.errors import FleetbenchError
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.meeting import Meeting
from real.checkpoints.saving import SumsDropped, load, load_some, save
from real.communication.communicators import Communicators
from real.engine.engine import Engine


class Trainee:
    """A case's model, optimizer, scheduler and engine. Parameters and random numbers differ by ``seed`` and rank."""

    def __init__(self, case: Case, communicators: Communicators, seed: int, **strategy: Any) -> None:
        self.case = case
        self.rank, self.ranks = communicators.rank, communicators.trainers
        torch.manual_seed(100 * seed + self.rank)
        self.model = _model(case)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01 * seed)
        self.optimizers = _optimizers(case, self.model)
        self.optimizer = self.optimizers[0]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [DECAY], gamma=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0 * seed, growth_interval=3, enabled=case.scales)
        self.engine = Engine(self.model, DistributedStrategy.from_dict(strategy or case.strategy), communicators)
        for optimizer in self.optimizers:
            self.engine.attach_optimizer(optimizer)
        if isinstance(self.model, problem.Gated):
            self.model.rank = self.rank
        self.history: list[Any] = []

    def train(self, first: int, last: int) -> None:
        """Steps ``first`` to ``last``, each on the batch of its number."""
        for step in range(first, last + 1):
            inputs, labels = problem.own_batch(step, self.rank, self.ranks, self.case.dtype)
            overflows = step == OVERFLOW and self.rank == 1
            if overflows and self.engine.strategy.amp:
                inputs = inputs * 1e30
            loss = cross_entropy(self.model(inputs), labels)
            if overflows and self.case.skips:
                loss = loss * torch.inf
            self.engine.report(loss)
            self.scaler.scale(loss).backward()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            self.model.zero_grad()
            self.scheduler.step()
            if step % EPOCH == 0 and self.engine.strategy.adaptive_localsgd_configs.variant == "document":
                self.engine.end_epoch()
            self.history.append(self.everything())

    def everything(self) -> Any:
        """All that later steps depend on and that can be seen from outside."""
        values = [problem.flat(self.model), *(buffer.reshape(-1).double() for buffer in self.model.buffers())]
        for state in (state for optimizer in self.optimizers for state in optimizer.state.values()):
            values += [value.reshape(-1).double() for value in state.values() if isinstance(value, torch.Tensor)]
        scalars = [self.engine.loss_scale, self.optimizer.param_groups[-1]["lr"], self.scaler.get_scale(), float(self.engine.num_updates)]
        return torch.cat([*values, torch.tensor(scalars, dtype=torch.float64)]).numpy().copy()

    @property
    def extra(self) -> dict[str, Any]:
        """What a script saves beside the training."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "turn": getattr(self.model, "turn", 0),
            "rank": self.rank,
        }

    def take(self, extra: dict[str, Any]) -> None:
        """Put that back."""
        assert extra["rank"] == self.rank
        self.scheduler.load_state_dict(extra["scheduler"])
        self.scaler.load_state_dict(extra["scaler"])
        if isinstance(self.model, problem.Gated):
            self.model.turn = extra["turn"]

    def read(self) -> dict[str, Any]:
        """What an epoch's end leaves, and then what the trainers agree on."""
        self.engine.end_epoch()
        found = {"epoch ended": self.everything()}
        self.engine.flush()
        found["synchronized"] = self.everything()
        self.engine.close()
        return {f"{self.case.name}/{name}": value for name, value in found.items()}

    def end(self) -> dict[str, Any]:
        """The trajectory, ragged at its beginning where an optimizer had no state yet; and what an averaging makes of its end."""
        self.engine.flush(end=True)
        found = {f"step {number}": values for number, values in enumerate(reversed(self.history))}
        found["end"] = self.everything()
        found["plan"] = np.array([self.engine.plan.digest])
        self.engine.close()
        return {f"{self.case.name}/{name}": value for name, value in found.items()}


def _model(case: Case) -> nn.Module:
    if case.model != "dropout":
        return problem.model(case.dtype, case.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Linear(problem.FEATURES, 20), nn.Dropout(0.5), nn.Tanh(), nn.Linear(20, problem.CLASSES)]
        return nn.Sequential(*layers).to(getattr(torch, case.dtype))


def _optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = model.parameters()
    if case.optimizer == "two":
        return [torch.optim.SGD([first], lr=0.02, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]
    if case.optimizer == "groups":
        return [torch.optim.SGD([{"params": [first], "lr": 0.02}, {"params": rest, "momentum": 0.8, "nesterov": True}], lr=problem.LR)]
    return [problem.optimizer_of(case.optimizer)(model)]


def _chosen(communicators: Communicators) -> list[Case]:
    names = json.loads(sys.argv[-1])
    return [case for case in cases(communicators.trainers) if case.name in names]


def train(folder: Path, communicators: Communicators, meeting: Meeting) -> dict[str, Any]:
    """Every case without a save, and with one that replaces another: that leaves nothing behind."""
    found = {}
    for case in _chosen(communicators):
        undisturbed = Trainee(case, communicators, 1)
        undisturbed.train(1, STEPS)
        found |= undisturbed.end()  # what is in flight must have gone before another engine's collectives
        disturbed = Trainee(case, communicators, 1)
        disturbed.train(1, case.saved - 1)
        save([disturbed.engine], meeting, folder / case.name, extra=None)
        disturbed.train(case.saved, case.saved)
        save([disturbed.engine], meeting, folder / case.name, extra=disturbed.extra)
        disturbed.train(case.saved + 1, STEPS)
        found |= {f"disturbed {name}": value for name, value in disturbed.end().items()}
        reading = Trainee(case, communicators, 1)
        reading.train(1, case.saved)
        found |= reading.read()
    return found


def resume(folder: Path, communicators: Communicators, meeting: Meeting) -> dict[str, Any]:
    """Every case from its save."""
    found = {}
    for case in _chosen(communicators):
        other = Trainee(case, communicators, 2)
        other.train(1, 3)  # what it has learnt by itself must not show
        loaded = load([other.engine], meeting, folder / case.name, resynchronize=False)
        assert loaded.step == case.saved - case.skips
        assert not loaded.missing
        other.take(loaded.extra)
        other.history.clear()
        other.train(case.saved + 1, STEPS)
        found |= other.end()
        found |= _read_at_once(case, folder / case.name, communicators, meeting)
    return found


def _read_at_once(case: Case, path: Path, communicators: Communicators, meeting: Meeting) -> dict[str, Any]:
    """A new process's first calls: load, save elsewhere, load that, and read the model."""
    fresh = Trainee(case, communicators, 3)
    fresh.engine.flush()
    fresh.engine.end_epoch()
    for source in (path, path.with_name(f"{case.name}, saved again")):
        extra = load([fresh.engine], meeting, source, resynchronize=False).extra
        if source == path:
            save([fresh.engine], meeting, path.with_name(f"{case.name}, saved again"), extra=extra)
    fresh.take(extra)
    return fresh.read()


def anew(folder: Path, communicators: Communicators, meeting: Meeting) -> dict[str, Any]:
    """What three trainers saved, by two: refused as it is; begun again where that is asked for."""
    found: dict[str, Any] = {}
    by_name = {case.name: case for case in CASES}
    case = by_name["Local SGD"]
    found["refused"] = np.array([_refusal(case, communicators, meeting, folder / case.name)])
    for name in (
        "Local SGD",
        "merge of 4, two of them in the sum",
        "adaptive",
        "fragment in flight",
        "outer optimizer",
    ):
        trainee = Trainee(by_name[name], communicators, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SumsDropped)
            loaded = load([trainee.engine], meeting, folder / name, resynchronize=True)
        found[f"{name}/begin"] = trainee.everything()
        found[f"{name}/parameters"] = problem.flat(trainee.model).numpy().copy()
        found[f"{name}/warned"] = np.array(sum(issubclass(warning.category, SumsDropped) for warning in caught))
        trainee.train(loaded.step + 1, STEPS)
        trainee.end()
        found[f"{name}/end"] = problem.flat(trainee.model).numpy().copy()
    by_two = Trainee(case, communicators, 1)
    by_two.train(1, case.saved)
    save([by_two.engine], meeting, folder / "by two", extra=by_two.extra)
    by_two.end()
    other = Trainee(case, communicators, 2, gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    found["another strategy refused"] = np.array([_refused(other, meeting, folder / "by two")])
    loaded = load([other.engine], meeting, folder / "by two", resynchronize=True)
    other.train(loaded.step + 1, STEPS)
    found["another strategy"] = problem.flat(other.model).numpy().copy()
    found["updates"] = np.array(other.engine.num_updates)
    other.engine.close()
    found |= _misuses(case, folder, communicators, meeting)
    return found


def _misuses(case: Case, folder: Path, communicators: Communicators, meeting: Meeting) -> dict[str, Any]:
    """What one rank of two does wrong is an error on both."""
    trainee = Trainee(case, communicators, 2)
    trainee.train(1, 3)
    found = {}
    own = folder / f"elsewhere {communicators.rank}"
    found["elsewhere"] = _message(lambda: save([trainee.engine], meeting, own, extra=None))
    blocked = folder / "blocked"
    if communicators.rank == 0:
        blocked.write_text("a file, where a folder is to be")
    found["blocked"] = _message(lambda: save([trainee.engine], meeting, blocked, extra=None))
    damaged = folder / "damaged"
    save([trainee.engine], meeting, damaged, extra=None)
    if communicators.rank == 0:
        (part,) = damaged.glob("save-*/rank-00001.pt")
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(bytes(data))
    meeting.gather([0])
    before = trainee.everything()
    found["damaged"] = _message(lambda: load([trainee.engine], meeting, damaged, resynchronize=False))
    found["changed"] = np.array(not np.array_equal(before, trainee.everything()))
    trainee.engine.close()
    return found | _partly(case, folder / "partly", communicators, meeting)


def _partly(case: Case, folder: Path, communicators: Communicators, meeting: Meeting) -> dict[str, Any]:
    """Some of a model, from one checkpoint and from files of the ranks' own that differ."""
    rank = communicators.rank
    trainee = Trainee(case, communicators, 1)
    trainee.train(1, 6)
    save([trainee.engine], meeting, folder, extra=None)
    other = Trainee(case, communicators, 2)
    load_some(other.engine, meeting, folder, lambda _: True)
    found = {"partly, some": torch.cat([tensor.reshape(-1).double() for tensor in other.model.state_dict().values()]).numpy().copy()}
    here = folder / f"disk of {rank}"
    here.mkdir()
    save_file({"0.bias": torch.full_like(other.model.get_parameter("0.bias"), float(rank))}, here / "trunk.safetensors")
    before = other.everything()
    with contextlib.chdir(here):
        trunk = Path("trunk.safetensors")
        found["other files"] = _message(lambda: load_some(other.engine, meeting, trunk, lambda _: True))
    found["other files changed"] = np.array(not np.array_equal(before, other.everything()))
    other.engine.close()
    trainee.engine.close()
    return found


def _refusal(case: Case, communicators: Communicators, meeting: Meeting, path: Path) -> str:
    trainee = Trainee(case, communicators, 2)
    text = _refused(trainee, meeting, path)
    trainee.engine.close()
    return text


def _refused(trainee: Trainee, meeting: Meeting, path: Path) -> str:
    return str(_message(lambda: load([trainee.engine], meeting, path, resynchronize=False)))


def _message(call: Any) -> Any:
    try:
        call()
    except FleetbenchError as error:
        return np.array(str(error))
    return np.array("")


def main() -> None:
    """Save what the phase found."""
    rank, ranks, store, output, phase, folder, _ = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    communicators.barrier()
    meeting = Meeting(timeout)
    found = {"train": train, "resume": resume, "again": anew}[phase](Path(folder), communicators, meeting)
    np.savez(output, **found)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
