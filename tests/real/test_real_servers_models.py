"""The models that servers are for, Word2Vec and Wide & Deep, on real servers and in one process of plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from server_job import SYNCHRONOUS, job, served, together
from torch import nn

from fleetbench.workloads.models.registry import LOSSES
from fleetbench.workloads.models.sparse import NUM_CATEGORICAL, NUM_NUMERIC, SkipGram, WideDeep

ROWS, STEPS = 40, 8
Batch = tuple[torch.Tensor, torch.Tensor]
Optimizer = Callable[..., torch.optim.Optimizer]

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse optimizers do not opt


def made(name: str) -> nn.Module:
    """A small model in float64, whose parameters are the same every time."""
    model = (SkipGram(ROWS, 3) if name == "word2vec" else WideDeep(ROWS, 3, 8, 2)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def batches(name: str, seed: int) -> list[Batch]:
    """Words of which every third step names only even ones, or clicks: numbers, categories and a label each."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(STEPS):
        if name == "word2vec":
            words = torch.randint(0, ROWS, (4, 1 + 3), generator=generator)
            found.append((words // 2 * 2 if step % 3 == 1 else words, torch.zeros(4)))
        else:
            numbers = torch.rand(4, NUM_NUMERIC, generator=generator, dtype=torch.float64)
            rows = torch.randint(0, ROWS, (4, NUM_CATEGORICAL), generator=generator).double()
            found.append((torch.cat([numbers, rows], 1), torch.randint(0, 2, (4,), generator=generator)))
    return found


def gradient(name: str, model: nn.Module, batch: Batch, share: float = 1.0) -> None:
    """Leave one batch's in ``.grad``, on top of what is there."""
    (LOSSES[name](model(batch[0]), batch[1]) * share).backward()


def all_of(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def in_one_process(name: str, make: Optimizer, trainers: int) -> torch.Tensor:
    """What plain torch makes of all trainers' batches by the mean of their gradients."""
    model = made(name)
    optimizer = make(model.parameters())
    own = [batches(name, rank) for rank in range(trainers)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(trainers):
            gradient(name, model, own[rank][step], 1 / trainers)
        optimizer.step()
    return all_of(model)


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.3),
    "sparse_adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1, eps=0.01),
}
ALSO = [pytest.param(*case, marks=pytest.mark.slow) for case in (("wide_deep", "sgd"), ("word2vec", "sgd"), ("word2vec", "adagrad"))]


@pytest.mark.parametrize(("name", "optimizer"), [("wide_deep", "adagrad"), ("word2vec", "sparse_adam"), *ALSO])
def test_synchronous_servers_train_it_as_one_process_does(name: str, optimizer: str) -> None:
    """Two trainers on two servers end with the parameters of one process with both batches, far from where it began."""
    expected = in_one_process(name, OPTIMIZERS[optimizer], 2)
    ends: dict[int, torch.Tensor] = {}
    with job(2, 2) as running:

        def work(rank: int) -> None:
            model = made(name)
            ours = OPTIMIZERS[optimizer](model.parameters())
            training = running.trainer(rank, model, ours, SYNCHRONOUS)
            for batch in batches(name, rank):
                ours.zero_grad()
                gradient(name, model, batch)
                ours.step()
            training.fetch()
            ends[rank] = all_of(model)
            training.finish()

        together(lambda: work(0), lambda: work(1))
        running.reports()
    for rank in (0, 1):
        assert torch.allclose(ends[rank], expected, rtol=0, atol=1e-12)
    assert (expected - all_of(made(name))).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "optimizer", "k_steps"),
    [
        ("wide_deep", "sgd", 0),
        ("word2vec", "sparse_adam", 0),
        ("wide_deep", "sgd", 3),
        pytest.param("word2vec", "sgd", 3, marks=pytest.mark.slow),
        pytest.param("wide_deep", "adagrad", 0, marks=pytest.mark.slow),
    ],
)
def test_alone_and_waiting_it_is_plain_training(name: str, optimizer: str, k_steps: int) -> None:
    """One trainer on two servers that waits for its pushes, or in GeoSGD has its own copy, ends where torch ends."""
    expected = in_one_process(name, OPTIMIZERS[optimizer], 1)
    with job(2) as running:
        model = made(name)
        ours = OPTIMIZERS[optimizer](model.parameters())
        training = running.trainer(0, model, ours, served(k_steps))
        for batch in batches(name, 0):
            ours.zero_grad()
            gradient(name, model, batch)
            ours.step()
            training.flush()
        if not k_steps:
            training.fetch()
        assert torch.allclose(all_of(model), expected, rtol=0, atol=1e-12)
        training.finish()
        running.reports()


class Bags(nn.Module):
    """Sums of rows, which are named by keyword, in 32 bits and in one row after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 2, mode="sum", sparse=True)
        nn.init.zeros_(self.bag.weight)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """A sum a bag."""
        return self.bag(input=rows, offsets=offsets)  # type: ignore[no-any-return]  # Module.__call__ is untyped


def test_a_bags_rows_are_pulled_whatever_way_they_are_named() -> None:
    """After a push of 1 to each number, the trainer's own table still has zeros, and its forward finds what the servers hold."""
    with job(2) as running:
        model = Bags()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        training = running.trainer(0, model, optimizer, served())
        rows, offsets = torch.tensor([1, 4, 4, 5], dtype=torch.int32), torch.tensor([0, 2, 2], dtype=torch.int32)
        model(rows, offsets).sum().backward()
        optimizer.step()
        training.flush()
        assert not model.bag.weight.any()
        model.eval()
        assert model(rows, offsets).tolist() == [[-3.0, -3.0], [0.0, 0.0], [-3.0, -3.0]]
        assert model.bag.weight[:, 0].tolist() == [0.0, -1.0, 0.0, 0.0, -2.0, -1.0]
        training.finish()
