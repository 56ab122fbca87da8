"""The trained model in a script's hands: what ``synchronize``, ``pull_model`` and ``save_inference_model`` leave with parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from server_job import SYNCHRONOUS, Job, job, served, together
from test_real_servers_training import Net, add, all_of, batches, counting, gradient, train

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.processes.roles import Role
from real.servers.served import Served
from real.servers.served_training import ServedTraining

LATE = served(1000, send_wait_times=10**6)
"""GeoSGD that exchanges when it is told to."""


@pytest.fixture
def both() -> Callable[[Job, Sequence[ServedTraining]], list[Served]]:
    """What ``fleet`` is on each trainer of a job."""

    def make(running: Job, trainings: Sequence[ServedTraining]) -> list[Served]:
        made = []
        for rank, training in enumerate(trainings):
            role = Role(launcher="Paddle", rank=rank, trainers=len(trainings), servers=running.endpoints)
            fleet = Served(role, DistributedStrategy(mode="ps"), 80.0)
            fleet.training = training
            made.append(fleet)
        return made

    return make


def test_synchronize_brings_rows_that_only_the_other_trainer_touched(both: Callable[..., list[Served]]) -> None:
    """All tables, without a forward: what rank 1 pushed is in rank 0's model."""
    with job(2, 2) as running:
        (model, _, first), (other, optimizer, second) = (counting(running, rank, served()) for rank in (0, 1))
        fleets = both(running, [first, second])
        add(other, optimizer, 3, 5.0, 1.0)
        second.flush()
        fleets[0].synchronize()
        assert model.table.weight[:, 0].tolist() == [0, 0, 0, -5.0, 0]  # type: ignore[union-attr,index]  # its table
        assert model.bias.tolist() == [-1.0] * 3  # type: ignore[operator]  # its parameter


@pytest.mark.parametrize("strategy", [served(), LATE, SYNCHRONOUS], ids=["asynchronous", "geo_sgd", "synchronous"])
def test_all_trainers_pull_one_model(strategy: DistributedStrategy, both: Callable[..., list[Served]]) -> None:
    """Each has trained its own rows, in GeoSGD its own copy, and has pushed nothing yet: both end with what the servers hold then."""
    with job(2, 2) as running:
        fleets: list[Served] = []
        pulled: list[torch.Tensor] = []
        begun: list[tuple] = [(), ()]
        together(*[lambda rank=rank: begun.__setitem__(rank, counting(running, rank, strategy)) for rank in (1, 0)])
        fleets += both(running, [training for _, _, training in begun])

        def work(rank: int) -> None:
            model, optimizer, _ = begun[rank]
            for step in range(3):
                add(model, optimizer, 2 * rank, 2.0, float(step))
            fleets[rank].pull_model()
            pulled.append(torch.cat([model.table.weight.detach().reshape(-1), model.bias.detach()]))
            if rank == 0:
                held.append(torch.cat([running.table().reshape(-1), running.dense()]))
            training = fleets[rank].training
            assert training is not None
            training.barrier()
            add(model, optimizer, 4, 2.0, 0.0)  # and training goes on
            fleets[rank].pull_model()
            assert torch.equal(model.table.weight.detach(), running.table())

        held: list[torch.Tensor] = []
        together(lambda: work(0), lambda: work(1))
        assert torch.equal(pulled[0], pulled[1])
        assert torch.equal(pulled[0], held[0])
        row = -6.0 if _mode(strategy) == "asynchronous" else -3.0
        assert pulled[0][[0, 4, 8]].tolist() == [row, row, 0.0]
        last = {"asynchronous": -4.0, "geo_sgd": -2.0, "synchronous": -2.0}[_mode(strategy)]
        assert float(running.table()[4, 0]) == last


def _mode(strategy: DistributedStrategy) -> str:
    return "synchronous" if not strategy.a_sync else "geo_sgd" if strategy.a_sync_configs.k_steps > 0 else "asynchronous"


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [served(), LATE], ids=["asynchronous", "geo_sgd"])
def test_the_servers_model_is_exported(strategy: DistributedStrategy, both: Callable[..., list[Served]], tmp_path: Path) -> None:
    """By rank 0, as it answers on the servers' parameters, and without this package's hooks; training goes on, looking rows up."""
    with job(2, 2) as running:
        models = [Net(rank) for rank in (0, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
        trainings = [running.trainer(rank, models[rank], optimizers[rank], strategy) for rank in (0, 1)]
        fleets = both(running, trainings)
        path = tmp_path / "net.pt2"

        def work(rank: int) -> None:
            train(models[rank], optimizers[rank], batches(3, rank), lambda: None)
            fleets[rank].save_inference_model(path, (batches(1, 9)[0][0],), None)
            trainings[rank].barrier()

        together(lambda: work(0), lambda: work(1))
        reference = Net()
        with torch.no_grad():
            reference.words.weight.copy_(running.table())
            begin = 0
            for parameter in (*reference.hidden.parameters(), *reference.out.parameters()):
                parameter.copy_(running.dense()[begin : begin + parameter.numel()].view_as(parameter))
                begin += parameter.numel()
        (ids, _) = batches(1, 5)[0]
        answer = torch.export.load(path).module()(ids)
        assert torch.allclose(answer, reference(ids), rtol=0, atol=1e-6)
        assert torch.equal(all_of(models[0]), all_of(models[1]))
        step = trainings[0].step
        gradient(models[0], batches(1, 3)[0])
        assert trainings[0].step == step + 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", [served(), LATE, SYNCHRONOUS], ids=["asynchronous", "geo_sgd", "synchronous"])
@pytest.mark.parametrize("how", ["to", "assign", "replaced", "data"])
def test_a_model_that_was_moved_behind_fleet_is_refused(how: str, strategy: DistributedStrategy) -> None:
    """Servers would train storage that nobody reads any more: the next forward raises, and names the parameter."""
    with job() as running:
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        running.trainer(0, model, optimizer, strategy)
        model(torch.ones(1, 2, 3, 3)).sum().backward()
        optimizer.step()
        if how == "to":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # of tensors
        elif how == "assign":
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        elif how == "replaced":
            model[0].weight = torch.nn.Parameter(torch.ones(3, 2, 3, 3))
        else:
            model[0].weight.data = torch.ones(3, 2, 3, 3)
        with pytest.raises(ConfigError, match=r"(?s)parameter 0\.weight: is no more where it was.*before fleet\.distributed_model"):
            model(torch.ones(1, 2, 3, 3))


def test_a_trainer_has_the_strategys_threads() -> None:
    """From when it joins until it has let go, also where it never came to join."""
    before = torch.get_num_threads()
    with job() as running:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = running.trainer(0, model, optimizer, served().replace(thread_num=before + 2))
        assert torch.get_num_threads() == before + 2
        training.finish()
        assert torch.get_num_threads() == before
