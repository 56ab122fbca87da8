"""Rules and shards of parameter servers: what a strategy's fields become, and who holds what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.plan.servers.rules import SERVED, ServerRules, Shards, Table, rules_of
from fleetbench.strategy import ASyncConfigs, DistributedStrategy
from fleetbench.support import refuse_unexecuted


def served(**configs: object) -> DistributedStrategy:
    """A strategy of parameter servers."""
    return DistributedStrategy(mode="ps", a_sync=True, a_sync_configs=ASyncConfigs(**configs))  # type: ignore[arg-type]  # its fields


def test_k_steps_choose_the_mode() -> None:
    """Fleet's table: a_sync off is synchronous, 0 asynchronous, above 0 GeoSGD, -1 GeoSGD with 800 where SGD's copies fit."""
    assert rules_of(DistributedStrategy(mode="ps"), 2, 1, optimizer="adam").mode == "synchronous"
    assert rules_of(served(k_steps=0), 2, 1, optimizer="adam").mode == "asynchronous"
    for k_steps, optimizer, memory, expected in (
        (400, "sgd", None, ("geo_sgd", 400)),
        (-1, "sgd", 500, ("geo_sgd", 800)),
        (-1, "sgd", 499, ("asynchronous", 0)),
        (-1, "adam", 500, ("asynchronous", 0)),
    ):
        rules = rules_of(served(k_steps=k_steps), 2, 1, optimizer=optimizer, parameter_bytes=100, memory_bytes=memory)
        assert (rules.mode, rules.k_steps) == expected


def test_fleets_bounds_become_the_rules() -> None:
    """Each field of a_sync_configs that is executed ends up in the rules, and has Fleet's default there."""
    configs = {
        "max_merge_var_num": 5,
        "send_queue_size": 6,
        "thread_pool_size": 7,
        "send_wait_times": 8,
        "min_send_grad_num_before_recv": 9,
    }
    rules = rules_of(served(k_steps=0, independent_recv_thread=True, **configs), 2, 3, optimizer="sgd")
    bounds = (
        rules.max_merge,
        rules.queue_size,
        rules.pushes_in_flight,
        rules.idle_ns,
        rules.sends_before_receive,
        rules.independent_receive,
    )
    assert bounds == (5, 6, 7, 80_000_000, 9, True)
    assert rules_of(served(k_steps=0), 2, 3, optimizer="sgd") == ServerRules(mode="asynchronous", trainers=2, servers=3)


def test_what_servers_do_not_carry_out_is_refused_by_name() -> None:
    """Fields of collective training, a mode without servers, GeoSGD with another optimizer: each is named."""
    with pytest.raises(ConfigError, match="runtime_split_send_recv"):
        rules_of(served(runtime_split_send_recv=True), 1, 1, optimizer="sgd")
    with pytest.raises(ConfigError, match=r'(?s)fp16_allreduce.*leave it at its default, or set mode = "collective"'):
        rules_of(DistributedStrategy(mode="ps", fp16_allreduce=True), 1, 1, optimizer="sgd")
    with pytest.raises(ConfigError, match="momentum"):
        rules_of(served(k_steps=4), 1, 1, optimizer="momentum")
    with pytest.raises(ConfigError, match="mode"):
        rules_of(DistributedStrategy(), 1, 1, optimizer="sgd")
    with pytest.raises(ConfigError, match="servers"):
        rules_of(DistributedStrategy(mode="ps"), 1, 0, optimizer="sgd")
    assert "strategy.a_sync_configs.k_steps" in SERVED


@pytest.mark.parametrize(("name", "value"), [("servers", 2), ("server_placement", "shared")])
def test_servers_without_a_mode_for_them_are_refused_with_the_mode(name: str, value: object) -> None:
    """No other executor would have them."""
    cluster = Cluster(**{name: value})  # type: ignore[arg-type]  # its fields
    with pytest.raises(ConfigError, match=f'(?s)cluster.{name}: an executor does not execute this.*set strategy.mode = "ps"') as raised:
        refuse_unexecuted(cluster, "cluster", frozenset(), "an executor")
    assert "another executor" not in str(raised.value)


@given(servers=st.integers(1, 7), dense=st.integers(0, 100), rows=st.integers(1, 50))
def test_shards_part_everything_evenly(servers: int, dense: int, rows: int) -> None:
    """Ranges follow each other and differ by one number at most; every row is on the server of its number, once."""
    shards = Shards(servers=servers, dense=dense, tables=(Table(name="words", rows=rows, width=3),))
    ranges = [(part.start, part.stop) for part in map(shards.dense_part, range(servers))]
    assert [begin for begin, _ in ranges] == [0, *[end for _, end in ranges[:-1]]]
    assert ranges[-1][1] == dense
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert [shards.num_rows(0, server) for server in range(servers)] == [len(range(server, rows, servers)) for server in range(servers)]
