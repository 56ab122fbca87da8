"""GeoSGD on real servers: Fleet's algorithm, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from server_job import dice, job, served, together
from test_real_servers_training import Net, add, all_of, batches, counting, train

from real.servers.served_training import ServedTraining


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
        assert running.threads[0].server._state.version == 5


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
