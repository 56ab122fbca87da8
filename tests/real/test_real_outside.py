"""Weights that a script changes beside its optimizer, as by loading: training goes on from them, or the change is refused by name.

The truth is the strategy's algorithm in one process, a network a trainer, with the same change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_problem as problem
from outside_cases import CASES, FAMILIES, READ, SAMPLE, STEPS, WAYS, Case
from processes import Arrays, run_ranks, values_of
from torch.nn.functional import cross_entropy
from zero_trainer import ZeroTrainer, engine_of

from fleetbench.errors import ConfigError, WorkerFailed
from real.job.launcher import launch_script

RANKS = 2
PARTS = ({0, 1}, {2, 3, 4, 5, 6, 7})
"""Parameters of two fragments by hand: layers of 520, 287, 264 and 170 numbers are best cut into 520 and 721."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Arrays]:
    """What every rank found in the cases, and in the readings, that the tests look at."""
    chosen = [*map(str, values_of(request, "case")), *values_of(request, "number")]
    return run_ranks(Path(__file__).with_name("outside_rank.py"), RANKS, json.dumps(chosen), str(tmp_path_factory.mktemp("read")))


class WrittenOut:
    """The trainers of a case in one process: gradients or parameters are averaged by hand."""

    def __init__(self, case: Case) -> None:
        self._case, self._family = case, FAMILIES[case.family]
        self._networks = [problem.model("float64") for _ in range(RANKS)]
        self._optimizers = [torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.5) for network in self._networks]
        self._members = [list(network.parameters()) for network in self._networks]
        self._theta = [value.detach().clone() for value in self._members[0]]
        self._velocity = [torch.zeros_like(value) for value in self._theta]
        self._deltas: dict[int, torch.Tensor] = {}
        self._parts = PARTS if self._family.fragments == 2 else (set(range(len(self._theta))),)
        self._turn = 0

    def train(self) -> np.ndarray[Any, Any]:
        """Parameters ``(ranks, steps + 1, parameters)``."""
        moment, history = self._family.moments[self._case.moment], []
        if moment == 0:
            self._change()
        for step in range(1, STEPS + 1):
            self._backward(step)
            if step % self._family.merge == 0:
                self._update()
                self._exchange(step)
            history.append([problem.flat(network).numpy().copy() for network in self._networks])
            if step == moment:
                self._change()
        self._end()
        history.append([problem.flat(network).numpy().copy() for network in self._networks])
        return np.array(history).swapaxes(0, 1)

    @torch.no_grad()
    def _change(self) -> None:
        """New values that all trainers share are what they agree on."""
        before = [value.clone() for value in self._members[0]]
        for network in self._networks:
            WAYS[self._case.way](network)
        for place, values in enumerate(zip(*self._members, strict=True)):
            if not torch.equal(values[0], before[place]) and torch.equal(values[0], values[1]):
                self._theta[place] = values[0].detach().clone()

    def _backward(self, step: int) -> None:
        for rank, network in enumerate(self._networks):
            inputs, labels = problem.own_batch(step, rank, RANKS, "float64")
            (cross_entropy(network(inputs), labels) / self._family.merge).backward()

    @torch.no_grad()
    def _update(self) -> None:
        if not self._family.meets:
            for values in zip(*self._members, strict=True):
                mean = torch.stack([value.grad for value in values if value.grad is not None]).mean(dim=0)
                for value in values:
                    value.grad = mean.clone()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def _exchange(self, step: int) -> None:
        if step + self._family.overlap in self._family.meets:
            self._set_out(self._parts[self._turn])
        if step in self._family.meets:
            self._land(self._family.mixing)
            self._turn = (self._turn + 1) % len(self._parts)
            if "momentum" in self._family.strategy.get("localsgd_configs", {}):
                self._average_momentum()

    def _set_out(self, part: set[int]) -> None:
        for place in part:
            distances = [own[place].detach() - self._theta[place] for own in self._members]
            self._deltas[place] = torch.stack(distances).mean(dim=0)

    def _land(self, share: float) -> None:
        rate, momentum = self._family.outer
        for place, delta in self._deltas.items():
            self._velocity[place] = momentum * self._velocity[place] + delta
            self._theta[place] = self._theta[place] + rate * (delta + momentum * self._velocity[place])
            for own in self._members:
                own[place].copy_((1 - share) * self._theta[place] + share * own[place])
        self._deltas = {}

    def _average_momentum(self) -> None:
        for values in zip(*self._members, strict=True):
            states = [optimizer.state[value] for optimizer, value in zip(self._optimizers, values, strict=True)]
            mean = torch.stack([state["momentum_buffer"] for state in states]).mean(dim=0)
            for state in states:
                state["momentum_buffer"] = mean.clone()

    @torch.no_grad()
    def _end(self) -> None:
        """Trainers agree: what has not met since the last step's end, one fragment after the other."""
        met = STEPS in self._family.meets
        if not self._family.meets or (met and self._family.fragments == 1):
            return
        just = (self._turn - 1) % len(self._parts)
        for number, part in enumerate(self._parts):
            if not (met and number == just and not self._family.mixing):
                self._set_out(part)
                self._land(0.0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES])
def test_changed_weights_are_what_training_goes_on_from(results: list[Arrays], case: Case) -> None:
    """At every step every rank holds what the algorithm with the same change gives it; what cannot be right is refused on every rank."""
    found = [rank[str(case)] for rank in results]
    if case.refused:
        assert all(case.refused in str(text) for text in found), found
        return
    for rank, own in zip(found, WrittenOut(case).train(), strict=True):
        np.testing.assert_allclose(rank, own, rtol=0, atol=FAMILIES[case.family].tolerance)


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(len(READ)), ids=[f"{family}, {moment}" for family, moment in READ])
def test_weights_that_were_loaded_are_what_is_saved_and_read(results: list[Arrays], number: int) -> None:
    """A save, an epoch's end and ``synchronize`` directly after a load give the loaded weights, on which an outer momentum then acts."""
    network = problem.model("float64")
    WAYS["load_state_dict"](network)
    loaded = problem.flat(network).numpy()
    family, moment = FAMILIES[READ[number][0]], READ[number][1]
    rests = family.outer[1] == 0 or moment == "after it" or (moment == "after an averaging" and family.fragments == 1)
    for rank in results:
        saved, held, agreed = rank[str(number)]
        np.testing.assert_allclose(saved, loaded, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(held, loaded)
        np.testing.assert_array_equal(agreed, results[0][str(number)][2])
        np.testing.assert_allclose(agreed, loaded, rtol=0, atol=family.tolerance if rests else 2.0)
        assert rests or np.abs(agreed - loaded).max() > 1e-6


@pytest.mark.usefixtures("forked_launches")
def test_weights_that_one_rank_alone_loads_end_the_job_by_name(tmp_path: Path) -> None:
    """The rank waits for the others to do the same, no longer than any collective may take, and says who did not come."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import torch\nfrom fleetbench import DistributedStrategy, fleet\n"
        "fleet.init(DistributedStrategy(localsgd=True, localsgd_configs={'k_steps': 4}), timeout_s=3)\n"
        "model = fleet.distributed_model(torch.nn.Linear(4, 1))\n"
        "if fleet.is_first_worker(): torch.nn.init.ones_(model.weight)\n"
        "optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for step in range(9): model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    with pytest.raises(WorkerFailed, match=r"parameters changed outside of optimizer.step\(\): not every trainer came.*Ranks? 1"):
        launch_script(2, [str(script)], log_dir=tmp_path / "log", echo=lambda _: None)


def test_another_memory_format_is_refused_while_buffers_have_the_old_one(others: ZeroTrainer) -> None:
    """Distances lie in memory as the parameters did: in another order an averaging would mix them up."""
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    images = torch.ones(2, 3, 8, 8)
    network(images)
    engine, optimizer = engine_of(network, others, localsgd=True, localsgd_configs={"k_steps": 4, "outer_lr": 0.7})
    for _ in range(2):
        network(images).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs know it of tensors alone
    with pytest.raises(ConfigError, match=r"parameter 0.weight: has another shape, type or memory format[\s\S]*before fleet"):
        network(images)
    engine.close()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "fp16_allreduce": True},
        {"build_strategy": {"enable_backward_optimizer_op_deps": False}},
        {"build_strategy": {"fuse_all_optimizer_ops": True}},
    ],
    ids=["synchronous", "gradient merge", "gradient merge in FP16", "update by bucket", "fused update"],
)
@pytest.mark.parametrize("moment", [0, 1, 4, 5])
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # torch's Reducer copies, which takes time alone
def test_another_memory_format_changes_no_number_of_averaged_gradients(others: ZeroTrainer, fields: dict[str, Any], moment: int) -> None:
    """Also in the middle of a gradient merge, whose sum lies in memory as the parameters did."""
    found = []
    for changes in (False, True):
        torch.manual_seed(1)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(144, 2)).double()
        engine, optimizer = engine_of(network, others, **fields)
        for step in range(8):
            if changes and step == moment:
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # see above
            network(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(problem.flat(network))
        engine.close()
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
