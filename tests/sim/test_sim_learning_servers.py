"""Virtual trainers of parameter servers: they follow an order as a loop written here does, and the simulator's clock decides that order."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_cases import ASYNCHRONOUS, CLICKS, DIGITS, PAIRS, SYNCHRONOUS, geo_sgd, merging, served
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.workloads.data.data import open_batches, prepare
from fleetbench.workloads.models.registry import build_model, loss_of
from fleetbench.workloads.training import sampler_of
from sim.learning.served import Played, ServedReplay, served_job
from sim.learning.trajectory import key_of
from sim.learning.virtual_training import train
from sim.run import simulate
from sim.servers.actor import Act, Order
from sim.servers.simulate import execute

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse gradients do not opt
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Drawn:
    """Acts as chance has them, each of which may come next: any trainer, sender or server goes on, if the messages it needs are there."""

    def __init__(self, experiment: Experiment, mode: str, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311  # no secret
        self.order, self.mode = Order(), mode
        self.trainers, self.servers = experiment.cluster.trainers, range(experiment.cluster.servers)
        self.num_look_ups = 2 if mode != "geo" and "mlp" not in experiment.workload.model else 0
        self.todo, self.queued = [experiment.workload.steps] * self.trainers, [0] * self.trainers
        self.looks = [[0 for _ in self.servers] for _ in range(self.trainers)]
        self.states = [["idle" for _ in self.servers] for _ in range(self.trainers)]
        while choices := [choice for rank in range(self.trainers) for choice in self.choices(rank)]:
            name, rank, server = chance.choice(choices)
            getattr(self, name)(rank, server, chance)

    def choices(self, rank: int) -> list[tuple[str, int, int]]:
        """What a trainer, its sender, or a server on its behalf may do."""
        states, found = self.states[rank], []
        steps = self.todo[rank] > 0 and self.queued[rank] < 3
        if steps and min(self.looks[rank]) == self.num_look_ups:
            found.append(("forward", rank, 0))
        if self.queued[rank] and set(states) == {"idle"}:
            found.append(("merge", rank, 0))
        if set(states) == {"answered"}:
            found.append(("install", rank, 0))
        for server in self.servers:
            if steps and self.looks[rank][server] < self.num_look_ups:
                found.append(("look_up", rank, server))
            if states[server] == "pushed":
                found.append(("apply", rank, server))
            if states[server] == "applied" and "pushed" not in states:
                found.append(("answer", rank, server))
        return found

    def forward(self, rank: int, *_: Any) -> None:
        """A step."""
        self.order.add(Act("trainer", rank, "forward"))
        self.order.add(Act("trainer", rank, "update" if self.mode == "geo" else "skip"))
        self.todo[rank] -= 1
        self.queued[rank] += 1
        self.looks[rank] = [0 for _ in self.servers]

    def merge(self, rank: int, _server: int, chance: random.Random) -> None:
        """A push of some gradients, or of a delta."""
        if self.mode == "geo":
            count, act = self.queued[rank], Act("sender", rank, "merge", "delta", divisor=self.trainers)
        else:
            count, act = chance.randint(1, self.queued[rank]), Act("sender", rank, "merge", "gradient")
        self.order.add(act._replace(num=count))
        self.queued[rank] -= count
        self.states[rank] = ["pushed" for _ in self.servers]

    def install(self, rank: int, *_: Any) -> None:
        """What all servers answered."""
        self.order.add(Act("sender", rank, "install", "delta" if self.mode == "geo" else "parameters"))
        self.states[rank] = ["idle" for _ in self.servers]

    def look_up(self, rank: int, server: int, _chance: random.Random) -> None:
        """Rows of a table."""
        self.order.add(Act("server", server, "rows", "rows", of=rank))
        self.looks[rank][server] += 1

    def apply(self, rank: int, server: int, _chance: random.Random) -> None:
        """A push."""
        self.order.add(Act("server", server, "accumulate" if self.mode == "geo" else "update", of=rank, num=1))
        self.states[rank][server] = "applied"

    def answer(self, rank: int, server: int, _chance: random.Random) -> None:
        """A pull."""
        self.order.add(Act("server", server, "parameters", "parameters", of=rank))
        self.states[rank][server] = "answered"


class ByHand:
    """All parameters as dictionaries of tensors, server by server; each part of a parameter has a mask that says which server holds it."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        workload, seed = experiment.workload, experiment.run.seed
        prepare(workload, seed, folder)
        self.workload, self.num = workload, experiment.cluster.trainers
        self.batches = [open_batches(workload, folder, sampler_of(experiment, folder, self.num, rank)) for rank in range(self.num)]
        self.model = build_model(workload.model, workload.model_options, workload.dtype, seed)
        self.held = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        sparse = {
            f"{name}.weight": module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }
        for module in sparse.values():
            module.sparse = False
        self.tables = list(sparse)
        total = sum(value.numel() for name, value in self.held.items() if name not in sparse)
        servers, place = experiment.cluster.servers, 0
        self.masks: list[dict[str, torch.Tensor]] = [{} for _ in range(servers)]
        for name, value in self.held.items():
            for server in range(servers):
                if name in sparse:
                    self.masks[server][name] = ((torch.arange(len(value)) % servers) == server)[:, None].expand_as(value)
                else:
                    where = torch.arange(place, place + value.numel()).view_as(value)
                    self.masks[server][name] = (where >= server * total // servers) & (where < (server + 1) * total // servers)
            place += 0 if name in sparse else value.numel()
        self.own = [{name: value.clone() for name, value in self.held.items()} for _ in range(self.num)]
        self.old = [{name: value.clone() for name, value in self.held.items()} for _ in range(self.num)]
        self.marked = [{name: torch.zeros_like(value, dtype=torch.bool) for name, value in self.held.items()} for _ in range(self.num)]
        self.news = [{name: torch.zeros_like(value, dtype=torch.bool) for name, value in self.held.items()} for _ in range(self.num)]
        self.queues: list[deque[Any]] = [deque() for _ in range(self.num)]
        self.ways: dict[tuple[int, int], deque[Any]] = {}
        self.answers: dict[tuple[int, int], deque[Any]] = {}
        self.looks: dict[tuple[int, int], int] = {}
        self.step = [0] * self.num
        self.moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in self.held.items()}
        self.counts = dict.fromkeys(range(servers), 0)

    def follow(self, order: Order, mode: str) -> dict[str, torch.Tensor]:
        """What servers hold in the end."""
        for act in order.acts:
            if act.kind == "forward":
                self.forward(act.rank, mode)
            elif act.kind == "merge":
                self.merge(act.rank, act.num, mode)
            elif act.kind == "install":
                self.install(act.rank, mode)
            elif act.role == "server":
                assert act.of is not None
                self.serve(act.kind, act.rank, act.of, mode)
        return self.held

    def serve(self, kind: str, server: int, rank: int, mode: str) -> None:
        """A push is applied, a pull or a look-up answered."""
        masks = self.masks[server]
        if kind in ("update", "accumulate"):
            push, touched, rate = self.ways[rank, server].popleft()
            if mode != "geo":
                self.apply(server, push, touched, rate)
                return
            for name, mask in masks.items():
                self.held[name][mask] += push[name][mask]
                for other in range(self.num):
                    if other != rank:
                        self.news[other][name] |= touched[name] & mask
        elif kind == "parameters":
            fresh = {name: self.news[rank][name] & mask for name, mask in masks.items()}
            held = {name: value.clone() for name, value in self.held.items()}
            self.answers.setdefault((rank, server), deque()).append((held, fresh))
            for name, mask in masks.items():
                self.news[rank][name] &= ~mask
        else:
            self.looks[rank, server] = look = self.looks.get((rank, server), -1) + 1
            name = self.tables[look % len(self.tables)]  # of it all rows: a forward reads what was asked for alone
            self.own[rank][name][masks[name]] = self.held[name][masks[name]]

    def forward(self, rank: int, mode: str) -> None:
        """A step's gradient; in GeoSGD also the step."""
        inputs, labels = self.batches[rank].batch(self.step[rank])
        self.step[rank] += 1
        own = {name: value.clone().requires_grad_() for name, value in self.own[rank].items()}
        loss_of(self.workload.model)(torch.func.functional_call(self.model, own, (inputs,)), labels).backward()
        rate = self.workload.lr * (0.5 if self.step[rank] >= 4 else 1.0)
        gradient = {name: value.grad for name, value in own.items()}
        touched = {
            name: (value != 0).any(1, keepdim=True).expand_as(value) if name in self.tables else torch.ones_like(value, dtype=torch.bool)
            for name, value in gradient.items()
        }
        if mode == "geo":
            for name, value in gradient.items():
                self.own[rank][name] -= rate * value
                self.marked[rank][name] |= touched[name]
        else:
            self.queues[rank].append((gradient, touched, rate))

    def merge(self, rank: int, count: int, mode: str) -> None:
        """What goes out to all servers."""
        if mode == "geo":
            touched = self.marked[rank]
            push = {
                name: torch.where(touched[name], (value - self.old[rank][name]) / self.num, 0.0) for name, value in self.own[rank].items()
            }
            for name, value in push.items():
                self.old[rank][name] += value
            self.marked[rank] = {name: torch.zeros_like(value) for name, value in touched.items()}
            staged = push, touched, 0.0
        else:
            taken = [self.queues[rank].popleft() for _ in range(count)]
            push = {name: sum(gradient[name] for gradient, _, _ in taken) for name in self.held}
            touched = {name: torch.stack([own[name] for _, own, _ in taken]).any(0) for name in self.held}
            staged = push, touched, taken[-1][2]
        for server in range(len(self.masks)):
            self.ways.setdefault((rank, server), deque()).append(staged)

    def apply(self, server: int, push: dict[str, torch.Tensor], touched: dict[str, torch.Tensor], rate: float) -> None:
        """The optimizer's step of the touched rows, by its formula."""
        self.counts[server] += 1
        for name, mask in self.masks[server].items():
            where = mask & touched[name]
            gradient = push[name][where]
            if self.workload.optimizer == "sgd":
                self.held[name][where] -= rate * gradient
                continue
            first, second = self.moments[name]
            if self.workload.optimizer == "adagrad":
                second[where] += gradient**2
                self.held[name][where] -= rate * gradient / (second[where].sqrt() + 1e-10)
                continue
            first[where] = 0.9 * first[where] + 0.1 * gradient
            second[where] = 0.999 * second[where] + 0.001 * gradient**2
            mean, square = first[where] / (1 - 0.9 ** self.counts[server]), second[where] / (1 - 0.999 ** self.counts[server])
            self.held[name][where] -= rate * mean / (square.sqrt() + 1e-8)

    def install(self, rank: int, mode: str) -> None:
        """What all servers answered."""
        for server, masks in enumerate(self.masks):
            held, fresh = self.answers[rank, server].popleft()
            for name, mask in masks.items():
                if name not in self.tables:
                    where = mask
                elif mode == "geo":
                    where = fresh[name]
                else:
                    continue
                if mode == "geo":
                    self.own[rank][name][where] += held[name][where] - self.old[rank][name][where]
                    self.old[rank][name][where] = held[name][where]
                else:
                    self.own[rank][name][where] = held[name][where]


DECAY = {"lr_decay": [{"step": 4, "factor": 0.5}], "steps": 7}


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("mode", "workload", "strategy"),
    [
        ("async", DIGITS, ASYNCHRONOUS),
        ("async", {**DIGITS, "optimizer": "adam", "lr": 0.01}, ASYNCHRONOUS),
        ("async", CLICKS, ASYNCHRONOUS),
        ("async", {**CLICKS, "optimizer": "adagrad"}, ASYNCHRONOUS),
        ("async", PAIRS, ASYNCHRONOUS),
        ("geo", DIGITS, geo_sgd(3)),
        ("geo", CLICKS, geo_sgd(3)),
        ("geo", PAIRS, geo_sgd(3)),
    ],
)
def test_a_drawn_order_is_followed_as_a_loop_by_hand_does(
    mode: str, workload: dict[str, Any], strategy: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    """Gradients merged and pushed late, pulls that overtake them, two servers that apply in other orders: all parameters are the loop's."""
    experiment = served({**workload, **DECAY}, strategy)
    order = Drawn(experiment, mode, seed).order
    replay = ServedReplay(experiment, Played(served_job(experiment), order), tmp_path / "replay")
    replay.run()
    by_hand = ByHand(experiment, tmp_path / "by hand")
    begun = torch.cat([value.reshape(-1) for value in by_hand.held.values()])
    expected = torch.cat([value.reshape(-1) for value in by_hand.follow(order, mode).values()])
    torch.testing.assert_close(replay.evaluated(), expected, **EXACT)
    assert (expected - begun).abs().max() > 1e-3


@pytest.mark.parametrize(("mode", "strategy"), [("async", ASYNCHRONOUS), ("geo", geo_sgd(3))])
def test_a_scaled_rate_is_so_many_times_the_rate(mode: str, strategy: dict[str, Any], tmp_path: Path) -> None:
    """In one drawn order, twice the rate by ``lr_scale`` and by ``workload.lr`` end at the same parameters."""
    ends = []
    for lr, scale in ((0.1, 1.0), (0.05, 2.0), (0.05, 1.0)):
        experiment = served({**DIGITS, **DECAY, "lr": lr}, strategy | {"lr_scale": scale})
        replay = ServedReplay(experiment, Played(served_job(experiment), Drawn(experiment, mode, 0).order), tmp_path / f"{lr} {scale}")
        replay.run()
        ends.append(replay.evaluated())
    torch.testing.assert_close(ends[1], ends[0], **EXACT)
    assert not torch.allclose(ends[2], ends[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_synchronous_servers_train_as_one_process(optimizer: str, tmp_path: Path) -> None:
    """By the mean of three gradients; losses and evaluations are those of collective synchronous training."""
    experiment = served({**DIGITS, "optimizer": optimizer, "lr": 0.01}, SYNCHRONOUS)
    replay = ServedReplay(experiment, Played.of(experiment), tmp_path / "replay")
    found = replay.run()
    workload = experiment.workload
    prepare(workload, experiment.run.seed, tmp_path)
    batches = [open_batches(workload, tmp_path, sampler_of(experiment, tmp_path, 3, rank)) for rank in range(3)]
    model = build_model(workload.model, workload.model_options, workload.dtype, experiment.run.seed)
    kinds = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam}
    plain = kinds[optimizer](model.parameters(), lr=0.01, **({"momentum": 0.9} if optimizer == "momentum" else {}))
    losses = []
    for step in range(workload.steps):
        plain.zero_grad()
        own = [nn.functional.cross_entropy(model(inputs), labels) for inputs, labels in (one.batch(step) for one in batches)]
        (sum(own) / 3).backward()  # type: ignore[union-attr]  # of three
        plain.step()
        losses.append([loss.item() for loss in own])
    torch.testing.assert_close(replay.evaluated(), torch.cat([value.detach().reshape(-1) for value in model.parameters()]), **EXACT)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-10)
    collective = train(experiment.replace(strategy=type(experiment.strategy)(), cluster=dataclasses.replace(experiment.cluster, servers=0)))
    np.testing.assert_allclose(found.held_out, collective.held_out, rtol=1e-10)
    assert found.final_loss == pytest.approx(collective.final_loss, rel=1e-10)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("workload", "strategy"), [(DIGITS, ASYNCHRONOUS), (DIGITS, merging(3)), (CLICKS, ASYNCHRONOUS), (PAIRS, geo_sgd(4))]
)
def test_the_clock_decides_what_is_learnt(workload: dict[str, Any], strategy: dict[str, Any]) -> None:
    """The simulation has the training's losses, its final loss and the time of its target; another link gives another training."""
    experiment = served(workload, strategy)
    found = train(experiment)
    target = sorted(loss for _, loss in found.held_out)[-2]
    aimed = experiment.replace(workload=dataclasses.replace(experiment.workload, target_loss=target))
    result = simulate(aimed, learnt=found)
    steps = result.steps
    for rank in range(3):
        np.testing.assert_array_equal(steps[steps["rank"] == rank].sort_values("step")["loss"], found.losses[:, rank])
    reached = found.crossing(target)
    begin = steps["start_s"].min()
    if reached is None:
        assert result.summary.time_to_target_s is None
    else:
        own = steps[steps["step"] == reached.step]
        parts = ["read_s", "forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s"]
        ends = own["start_s"] - begin + own[[name for name in parts if name in own]].sum(axis=1)
        assert result.summary.time_to_target_s == pytest.approx(ends.max(), rel=1e-3)
    assert result.summary.final_loss == found.final_loss
    assert result.summary.loss_from == "virtual trainers"
    assert not {"workload.target_loss", "workload.data"} & {entry["what"] for entry in result.summary.skipped}
    slower = experiment.replace(
        cluster=dataclasses.replace(experiment.cluster, inter=dataclasses.replace(experiment.cluster.inter, bandwidth=10**6))
    )
    assert train(slower).final_loss != found.final_loss
    with pytest.raises(ConfigError, match="belongs to another training"):
        simulate(slower, learnt=found)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", [SYNCHRONOUS, ASYNCHRONOUS, geo_sgd(3)])
def test_a_training_that_ends_at_its_target_is_the_whole_ones_beginning(strategy: dict[str, Any]) -> None:
    """Evaluations up to the third at or below it, and the same crossing; a target that is not reached cuts nothing."""
    experiment = served({**DIGITS, "steps": 24, "eval_every": 2}, strategy)
    whole = train(experiment)
    target = whole.held_out[4][1]
    first = next(step for step, loss in whole.held_out if loss <= target)
    cut = train(experiment, until=target)
    assert cut.held_out == whole.held_out[: len(cut.held_out)]
    assert first + 4 <= cut.held_out[-1][0] < 24
    assert cut.crossing(target) == whole.crossing(target) is not None
    assert train(experiment, until=0.0).held_out == whole.held_out


def test_a_limit_holds_while_the_order_is_still_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training has not begun when it ends it."""
    monkeypatch.setattr("sim.learning.virtual_training.ServedReplay", lambda *_: pytest.fail("trained"))

    def ends() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        train(served(DIGITS, ASYNCHRONOUS), look=ends)


def test_messages_are_as_large_as_the_data_make_them(tmp_path: Path) -> None:
    """A look-up names the rows that a server holds of a batch, and a push brings them: 4 bytes a row and 8 a number, counted here."""
    experiment = served({**PAIRS, "steps": 3}, ASYNCHRONOUS)
    job = served_job(experiment)
    prepare(experiment.workload, experiment.run.seed, tmp_path)
    for rank in range(3):
        batches = open_batches(experiment.workload, tmp_path, sampler_of(experiment, tmp_path, 3, rank))
        for step in range(3):
            words, _ = batches.batch(step)
            tables = [set(words[:, 0].tolist()), set(words[:, 1:].flatten().tolist())]
            for server in range(2):
                nums = [sum(row % 2 == server for row in rows) for rows in tables]
                asked = [job.traffic.looked_up(server, rank, step, number) for number in range(2)]
                assert asked == [(4 * num, 4 * 8 * num) for num in nums]
                assert job.traffic.pushed(server, [(rank, step, 1)]) == sum(nums) * (4 + 4 * 8)
    both = [
        words
        for step in range(2)
        for words in [open_batches(experiment.workload, tmp_path, sampler_of(experiment, tmp_path, 3, 1)).batch(step)[0]]
    ]
    joint = torch.cat(both)
    num = sum(row % 2 == 0 for row in set(joint[:, 0].tolist())) + sum(row % 2 == 0 for row in set(joint[:, 1:].flatten().tolist()))
    assert job.traffic.pushed(0, [(1, 0, 2)]) == num * 36
    seen = execute(job)
    first = [record for record in seen.records if record.step == 1]
    assert len({record.bytes_sent for record in first}) > 1


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_stale_gradients_hurt_at_a_high_learning_rate(seed: int) -> None:
    """Eight trainers whose gradients wait in long queues end higher than with the same servers over a fast link."""
    workload = {**DIGITS, "lr": 0.5, "steps": 40}
    ends = []
    for bandwidth in ("2 Mbit/s", "10 Gbit/s"):
        experiment = served(workload, ASYNCHRONOUS, nodes=8, inter={"bandwidth": bandwidth, "latency": "20 us"})
        found = train(experiment.replace(run=dataclasses.replace(experiment.run, seed=seed)))
        ends.append(found.final_loss if np.isfinite(found.final_loss) else np.inf)
    assert ends[0] > ends[1]


def test_weight_decay_on_rows_is_refused() -> None:
    """As real servers refuse it."""
    with pytest.raises(ConfigError, match=r"workload\.weight_decay"):
        train(served({**CLICKS, "weight_decay": 0.1}, ASYNCHRONOUS))
    assert key_of(served(DIGITS, ASYNCHRONOUS)) != key_of(served(DIGITS, SYNCHRONOUS))
