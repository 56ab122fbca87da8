"""GeoSGD on real servers: Fleet's algorithm, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from server_job import Job, dice, job, served, together
from test_real_servers_training import Net, add, all_of, batches, counting, gradient, train

from real.servers.served_training import ServedTraining


@pytest.mark.parametrize("trainers", [1, 2, 4])
def test_one_unit_update_reaches_the_server_geometrically(trainers: int) -> None:
    """A trainer changes a row and a dense number by 1 and then only touches them: after j rounds the server has 1 - (1 - 1/N)^j."""
    with job(2, trainers) as running:
        model, optimizer, training = counting(running, 0, served(1))
        for j in range(1, 7):
            add(model, optimizer, 3, -1.0 if j == 1 else 0.0, -1.0 if j == 1 else 0.0)
            training.flush()
            expected = 1 - (1 - 1 / trainers) ** j
            assert torch.allclose(running.table()[3], torch.tensor(expected), rtol=0, atol=1e-6)
            assert torch.allclose(running.dense(), torch.tensor(expected), rtol=0, atol=1e-6)
            assert torch.equal(running.table()[[0, 1, 2, 4]], torch.zeros(4, 2))


def test_the_rest_of_a_row_leaves_only_when_it_is_touched_again() -> None:
    """Two trainers: half of a row's 8 is sent; rounds that touch another row send none of the rest."""
    with job(1, 2) as running:
        model, optimizer, training = counting(running, 0, served(1))
        held = []
        for row, value in ((0, -8.0), (1, -1.0), (1, -1.0), (0, 0.0)):
            add(model, optimizer, row, value, 0.0)
            training.flush()
            held.append(float(running.table()[0, 0]))
        assert held == [4, 4, 4, 6]


def test_alone_geo_sgd_is_local_training() -> None:
    """With one trainer, trainer and servers have after every round what plain training has, but for the deltas' rounding."""
    plain, model = Net(), Net()
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    with job(2) as running:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = running.trainer(0, model, optimizer, served(1000, send_wait_times=10**6))
        for steps in (1, 4, 1, 3, 2):
            for batch in batches(steps, steps):
                train(plain, alone, [batch], lambda: None)
                train(model, optimizer, [batch], lambda: None)
            training.flush()
            assert torch.allclose(all_of(model), all_of(plain), rtol=0, atol=1e-6)
            servers = torch.cat([running.table().reshape(-1), running.dense()])
            assert torch.allclose(servers, all_of(plain), rtol=0, atol=1e-6)
        assert running.threads[0].server.report.updates == 5


class Written:
    """GeoSGD of Fleet's document in numpy: a table of 5 rows of 2 and 3 dense numbers, for two trainers, in float32."""

    def __init__(self) -> None:
        self.server = [np.zeros((5, 2), np.float32), np.zeros(3, np.float32)]
        self.latest = [[part.copy() for part in self.server] for _ in range(2)]
        self.old = [[part.copy() for part in self.server] for _ in range(2)]
        self.touched: list[set[int]] = [set(), set()]
        self.changed: list[set[int]] = [set(), set()]

    def step(self, rank: int, row: int, value: float, bias: float) -> None:
        """SGD with a learning rate of 1."""
        self.latest[rank][0][row] -= np.float32(value)
        self.latest[rank][1] -= np.float32(bias)
        self.touched[rank].add(row)

    def exchange(self, rank: int) -> None:
        """Push the touched rows' deltas, then pull the rows that the other changed; dense numbers whole."""
        rows = sorted(self.touched[rank])
        for part, where in ((0, rows), (1, slice(None))):
            delta = (self.latest[rank][part][where] - self.old[rank][part][where]) / np.float32(2)
            self.old[rank][part][where] += delta
            self.server[part][where] += delta
        self.touched[rank] = set()
        self.changed[1 - rank] |= set(rows)
        for part, where in ((0, sorted(self.changed[rank])), (1, slice(None))):
            self.latest[rank][part][where] += self.server[part][where] - self.old[rank][part][where]
            self.old[rank][part][where] = self.server[part][where]
        self.changed[rank] = set()


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_scripted_order_of_exchanges_equals_the_algorithm_written_out(num_servers: int) -> None:
    """Random steps and exchanges of two trainers in a given order: servers and trainers agree with numpy bit for bit."""
    chance = dice(7)
    written = Written()
    with job(num_servers, 2) as running:
        trainers = [counting(running, rank, served(1000, send_wait_times=10**6)) for rank in (0, 1)]
        for _ in range(60):
            rank = chance.randrange(2)
            model, optimizer, training = trainers[rank]
            for _ in range(chance.randrange(1, 4)):
                row, value, bias = chance.randrange(5), chance.gauss(0, 1), chance.gauss(0, 1)
                add(model, optimizer, row, value, bias)
                written.step(rank, row, value, bias)
            training.flush()
            written.exchange(rank)
            assert np.array_equal(running.table().numpy(), written.server[0])
            assert np.array_equal(running.dense().numpy(), written.server[1])
            assert np.array_equal(model.table.weight.detach().numpy(), written.latest[rank][0])  # type: ignore[union-attr]  # its table
            assert np.array_equal(model.bias.detach().numpy(), written.latest[rank][1])  # type: ignore[union-attr]  # its parameter


def test_sparse_rows_equal_the_dense_computation() -> None:
    """A table all of whose rows are touched in every round goes the way of the same numbers held as a dense parameter, bit for bit."""
    with job(2, 2) as running, job(2, 2) as other:
        sparse, dense = [], []
        for rank in (0, 1):
            sparse.append(counting(running, rank, served(1000, send_wait_times=10**6)))
            model = torch.nn.Linear(2, 5, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            dense.append((model, optimizer, other.trainer(rank, model, optimizer, served(1000, send_wait_times=10**6))))
        generator = torch.Generator().manual_seed(0)
        for number in range(12):
            rank = number % 2
            values = torch.randn(5, 2, generator=generator)
            model, optimizer, training = sparse[rank]
            model.table.weight.grad = torch.sparse_coo_tensor(torch.arange(5)[None], values, (5, 2), check_invariants=True)  # type: ignore[union-attr]  # its table
            model.bias.grad = torch.zeros(3)  # type: ignore[assignment]  # its parameter
            optimizer.step()
            training.flush()
            model, optimizer, training = dense[rank]
            model.weight.grad = values.clone()  # type: ignore[union-attr]  # its parameter
            optimizer.step()
            training.flush()
        assert torch.equal(running.table().reshape(-1), other.dense())
        assert len(set(other.dense().tolist())) == 10


def watch_deltas(training: ServedTraining, seen: list[torch.Tensor]) -> None:
    """Keep every delta that is taken: the table's, then the dense parameters'."""
    geo = training._geo
    assert geo is not None
    take = geo.take

    def watched(divisor: int):  # noqa: ANN202  # as take
        change = take(divisor)
        whole = torch.zeros(5, 2, dtype=change.tables[0][1].dtype)
        whole.index_add_(0, *change.tables[0])
        assert change.dense is not None
        seen.append(torch.cat([whole.reshape(-1), change.dense]))
        return change

    geo.take = watched  # type: ignore[method-assign]  # spied on


def test_training_goes_on_during_exchanges_and_no_delta_is_lost_or_doubled() -> None:
    """Two trainers step as fast as they can beside their exchanges: the servers end with the sum of all deltas, exactly.

    At most 34 exchanges halve rests of whole numbers: all bits lie between 2^12 and 2^-34, and float64 rounds nothing.
    """
    seen: list[torch.Tensor] = []
    took_during = []
    with job(2, 2) as running:

        def work(rank: int) -> None:
            strategy = served(25, send_wait_times=10**6)  # which no idle trainer's exchanges come on top of
            model, optimizer, training = counting(running, rank, strategy, dtype=torch.float64)
            watch_deltas(training, seen)
            own = dice(rank)
            for _ in range(400):
                add(model, optimizer, own.randrange(5), float(own.randrange(-4, 5)), 2.0)
                took_during.append(training._role.state.queued)  # type: ignore[union-attr]  # a trainer's
            training.finish()

        together(lambda: work(0), lambda: work(1))
        running.reports()
        assert torch.equal(torch.cat([running.table().reshape(-1), running.dense()]), torch.stack(seen).sum(0))
        assert 20 <= len(seen) <= 34
        assert max(took_during) <= 25


@pytest.mark.slow
def test_steps_made_during_an_exchange_are_not_lost() -> None:
    """Alone, with exchanges all the while, the trainer ends with every one of its steps, and the server with the same, exactly."""
    with job() as running:
        model, optimizer, training = counting(running, 0, served(2))
        expected = torch.zeros(5, 2)
        own = dice(1)
        for _ in range(1500):
            row, value = own.randrange(5), float(own.randrange(-8, 9))
            expected[row] -= value
            add(model, optimizer, row, value, 1.0)
        training.flush()
        assert torch.equal(model.table.weight.detach(), expected)  # type: ignore[union-attr]  # its table
        assert torch.equal(running.table(), expected)
        assert torch.equal(running.dense(), torch.full((3,), -1500.0))
        pushes = running.threads[0].server.report.updates
        assert 1500 / 4 <= pushes * 2 <= 1600


@pytest.mark.parametrize("k_steps", [1, 3])
def test_an_update_that_raises_does_not_stop_the_exchange(k_steps: int) -> None:
    """An optimizer that fails as often as K leaves the sender free to merge; what it had changed by then goes out, and training goes on."""
    with job() as running:
        model, optimizer, training = counting(running, 0, served(k_steps, send_wait_times=10**6))
        add(model, optimizer, 0, 1.0, 1.0)

        def fail() -> None:
            raise MemoryError

        optimizer._optimizer_step_code = fail  # type: ignore[attr-defined]  # what torch calls after the update, before the hooks
        for row in range(1, 1 + k_steps):
            with pytest.raises(MemoryError):
                add(model, optimizer, row, 1.0, 1.0)
            optimizer.zero_grad()
        del optimizer._optimizer_step_code  # type: ignore[attr-defined]  # torch's again
        together(lambda: [add(model, optimizer, 0, 1.0, 1.0) for _ in range(2 * k_steps)] and None)
        together(training.flush)
        assert running.table()[:, 0].tolist() == [-1.0 - 2 * k_steps, *[-1.0] * k_steps, *[0.0] * (4 - k_steps)]


def test_a_barrier_behind_an_update_that_raised_is_met() -> None:
    """The sender, who takes part in it, does not wait for the update to end."""
    with job(timeout_s=3.0) as running:
        model, optimizer, training = counting(running, 0, served(1))
        optimizer.param_groups[0]["lr"] = None
        with pytest.raises(TypeError):
            add(model, optimizer, 0, 1.0, 1.0)
        assert training._geo is not None
        assert training._geo.guard.locked()
        together(training.barrier)
        assert not training._geo.guard.locked()


def test_two_trainers_learn_what_the_other_learnt() -> None:
    """After a few exchanges without steps both have most of each other's change, and all of their own."""
    with job(1, 2) as running:
        trainers = [counting(running, rank, served(1)) for rank in (0, 1)]
        for rank in (0, 1):
            model, optimizer, training = trainers[rank]
            add(model, optimizer, rank, -8.0, 0.0)
            training.flush()
        for _ in range(12):
            for rank in (0, 1):
                model, optimizer, training = trainers[rank]
                add(model, optimizer, rank, 0.0, 0.0)
                training.flush()
        trainers[0][2].flush()
        for model, _, _ in trainers:
            assert torch.allclose(model.table.weight.detach()[:2], torch.full((2, 2), 8.0), atol=0.01)  # type: ignore[union-attr]  # its table


def test_the_look_up_of_a_geo_trainer_asks_nobody() -> None:
    """A forward reads the trainer's own copy: no message leaves."""
    with job() as running:
        assert isinstance(running, Job)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = running.trainer(0, model, optimizer, served(100))
        before = training.bytes_sent
        gradient(model, batches(1, 0)[0])
        assert training.bytes_sent - before < 1000  # a beat at most
