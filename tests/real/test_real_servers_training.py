"""Training with real servers, against plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from server_job import SYNCHRONOUS, Job, add_gradients, job, served, together

from fleetbench.errors import ConfigError
from fleetbench.plan.replay import Recording
from fleetbench.strategy import DistributedStrategy
from real.servers.links import Options
from real.servers.served_training import ServedTraining

WORDS = 11

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse optimizers do not opt


class Net(torch.nn.Module):
    """An embedding with sparse gradients, and dense layers after it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.nn.Embedding(WORDS, 4, sparse=True)
        self.hidden = torch.nn.Linear(4, 5)
        self.out = torch.nn.Linear(5, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        return self.out(torch.tanh(self.hidden(self.words(ids).mean(1))))[:, 0]


def batches(num: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Words, few of the many, and targets."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, WORDS, (6, 2), generator=generator), torch.randn(6, generator=generator)) for _ in range(num)]


def gradient(model: Net, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Leave one batch's in ``.grad``."""
    (model(batch[0]) - batch[1]).square().mean().backward()


def train(model: Net, optimizer: torch.optim.Optimizer, some: list[tuple[torch.Tensor, torch.Tensor]], then: Callable[[], None]) -> None:
    """The usual loop, with a learning rate that falls."""
    for number, batch in enumerate(some):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        gradient(model, batch)
        optimizer.step()
        then()


def all_of(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def counting(
    running: Job, rank: int, strategy: DistributedStrategy, dtype: torch.dtype = torch.float32, **links: object
) -> tuple[torch.nn.Module, torch.optim.Optimizer, ServedTraining]:
    """A trainer of a table of 5 rows and a bias, both zero, whose gradients are whole numbers and whose learning rate is 1."""
    model = torch.nn.Module()
    model.table = torch.nn.Embedding(5, 2, sparse=True, dtype=dtype)
    model.bias = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    torch.nn.init.zeros_(model.table.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, running.trainer(rank, model, optimizer, strategy, **links)  # type: ignore[arg-type]  # its options


def add(model: torch.nn.Module, optimizer: torch.optim.Optimizer, row: int, value: float, bias: float) -> None:
    """A step whose update takes ``value`` from a row and ``bias`` from the bias."""
    values = torch.full((1, 2), value, dtype=model.bias.dtype)  # type: ignore[arg-type]  # its parameter's
    model.table.weight.grad = torch.sparse_coo_tensor(torch.tensor([[row]]), values, (5, 2), check_invariants=True)  # type: ignore[union-attr]  # its table
    model.bias.grad = torch.full((3,), bias, dtype=model.bias.dtype)  # type: ignore[union-attr,arg-type]  # its parameter
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [served(), served(3), SYNCHRONOUS], ids=["asynchronous", "geo_sgd", "synchronous"])
def test_a_real_run_replays_to_the_same_operations(strategy: DistributedStrategy) -> None:
    """What trainer, sender and server heard in a real run, told to fresh roles, gives the operations that were executed."""
    recorded: list[Recording] = []
    with job(2, 2) as running:

        def work(rank: int) -> None:
            model, optimizer, training = counting(running, rank, strategy)
            for step in range(7):
                add(model, optimizer, step % 5, 1.0, 1.0)
            training.finish()
            recorded.extend(training.recordings())

        together(lambda: work(0), lambda: work(1))
        running.reports()
        recorded += [thread.server.role.recording() for thread in running.threads if thread.server.role is not None]
    assert sorted(recording.role for recording in recorded) == ["sender"] * 2 + ["server"] * 2 + ["trainer"] * 2
    for recording in recorded:
        assert len(recording.log) >= 7
        assert recording.replayed() == [operations for _, _, operations in recording.log]


@pytest.mark.parametrize("index", [-1, WORDS])
def test_an_index_that_the_table_does_not_have_raises_as_in_torch(index: int) -> None:
    """At once, torch's own error; training goes on with other indices."""
    with job() as running:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        training = running.trainer(0, model, optimizer, served())
        wrong = torch.tensor([[3, index]])
        with pytest.raises(IndexError):
            Net()(wrong)
        with pytest.raises(IndexError):
            together(lambda: model(wrong) and None)
        gradient(model, (torch.tensor([[3, 4]]), torch.tensor([9.0])))
        optimizer.step()
        training.finish()
        running.reports()


def test_a_model_that_servers_cannot_hold_is_refused() -> None:
    """Mixed types, an optimizer without a server's twin, groups that differ, a parameter without an optimizer: each is named."""
    with job() as running:
        half = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
        with pytest.raises(ConfigError, match=r"1\.weight"):
            running.trainer(0, half, torch.optim.SGD(half.parameters(), lr=0.1), served())
        model = torch.nn.Linear(2, 2)
        for optimizer, named in (
            (torch.optim.RMSprop(model.parameters(), lr=0.1), "RMSprop"),
            (torch.optim.SGD([{"params": [model.weight], "lr": 0.2}, {"params": [model.bias]}], lr=0.1), "groups"),
            (torch.optim.SGD([model.weight], lr=0.1), "bias"),
            (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5), r"(?s)has dampening, .*got 0\.5.*set dampening = 0"),
            (torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True), "(?s)has amsgrad, .*set amsgrad = False"),
            (torch.optim.Adam(model.parameters(), lr=0.1, decoupled_weight_decay=True), "has decoupled_weight_decay, "),
            (torch.optim.AdamW(model.parameters(), lr=0.1), "(?s)is no optimizer of a server.*got AdamW.*servers have torch.optim.SGD"),
            (torch.optim.SparseAdam(model.parameters(), lr=0.1), "SparseAdam trains sparse ones alone"),
        ):
            with pytest.raises(ConfigError, match=named):
                running.trainer(0, model, optimizer, served())
        with pytest.raises(ConfigError, match="momentum"):
            running.trainer(0, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), served(4))


@pytest.mark.parametrize(("momentum", "chosen"), [(0.0, "GeoSGD with k_steps = 800"), (0.9, "asynchronous; GeoSGD is for SGD")])
def test_the_first_trainer_says_what_was_chosen(momentum: float, chosen: str, capfd: pytest.CaptureFixture[str]) -> None:
    """``k_steps = -1`` is a choice that only the optimizer decides."""
    model = torch.nn.Linear(2, 2)
    with job() as running:
        training = running.trainer(0, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), served(-1))
        training.finish()
    assert f"trainer 0: a_sync_configs.k_steps = -1: {chosen}" in capfd.readouterr().err


@pytest.mark.parametrize("sparse", [True, False])
def test_an_embedding_whose_forward_changes_its_rows_is_refused(sparse: bool) -> None:
    """Servers would train rows that ``max_norm`` never shortened; in GeoSGD, and untrained, it is the trainer's own business."""
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, max_norm=1.5, sparse=sparse), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Options(number=0, endpoints=("127.0.0.1:9",))

    def attach(strategy: DistributedStrategy) -> None:
        training = ServedTraining(model, strategy, options)
        training.attach_optimizer(optimizer)
        training.close()

    for strategy in (served(), SYNCHRONOUS):
        with pytest.raises(ConfigError, match=r"embedding 0: shortens its rows.*max_norm=1\.5"):
            attach(strategy)
    attach(served(3))
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr,operator]  # its parameter
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    attach(served())


def test_options_that_change_on_the_way_are_refused() -> None:
    """Servers were told them once: another momentum, rates that part, a rate that is no number end the step, and the next counts."""
    with job() as running:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0, momentum=0.9)
        training = running.trainer(0, model, optimizer, served())
        begun = running.dense().clone()
        first, second = optimizer.param_groups
        for group, name, value, named in (
            (first, "momentum", 0.5, "has momentum = 0.5, and servers were told 0.9"),
            (second, "momentum", 0.5, "has momentum = 0.5, and servers were told 0.9"),
            (second, "lr", 0.5, "several learning rates"),
            (first, "lr", float("nan"), "several learning rates"),
        ):
            kept, group[name] = group[name], value
            add_gradients(model, 1.0)
            with pytest.raises(ConfigError, match=named):
                optimizer.step()
            group[name] = kept
        first["lr"] = second["lr"] = float("inf")
        with pytest.raises(ConfigError, match="a rate that is no number"):
            optimizer.step()
        first["lr"] = second["lr"] = 0.25
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=9, div_factor=2.0, cycle_momentum=False)
        optimizer.step()
        schedule.step()
        training.finish()
        running.reports()
        assert torch.equal(running.dense(), begun - 0.25)


def test_what_the_loss_does_not_reach_has_a_gradient_of_zeros() -> None:
    """A parameter without a gradient moves on by its momentum, where torch alone would leave it."""
    with job() as running:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        training = running.trainer(0, model, optimizer, served())
        add_gradients(model, 1.0)
        optimizer.step()
        model.bias.grad = None
        optimizer.step()
        training.finish()
        running.reports()
        assert running.dense().tolist() == [-2.5, -1.5]


def test_trainers_with_different_models_do_not_join_one_job() -> None:
    """The second trainer's other width is refused, and the first goes on."""
    with job(1, 2) as running:
        model, optimizer, training = counting(running, 0, served())
        other = torch.nn.Linear(3, 3)
        with pytest.raises(ConfigError, match="refuses"):
            running.trainer(1, other, torch.optim.SGD(other.parameters(), lr=0.1), served())
        add(model, optimizer, 0, 1.0, 1.0)
        training.flush()
        assert torch.equal(running.dense(), torch.full((3,), -1.0))
