"""``cluster.churn``: what a trace of availability may hold, and what is refused, with the number of the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment

COSTS = {"checkpoint_time": "40 s", "restart_time": "5 min"}


def _read(churn: dict[str, Any], nodes: int = 4) -> Experiment:
    return Experiment.from_dict({"cluster": {"nodes": nodes, "churn": {**COSTS, **churn}}})


def test_a_file_is_its_rows(tmp_path: Path) -> None:
    """Relative to the experiment file, with or without zones; the experiment then holds the rows, and no path."""
    (tmp_path / "spot.csv").write_text("time_s, zone, nodes\n0, a, 2\n0, b, 1\n90.5, a, 3\n", encoding="utf-8")
    (tmp_path / "one.csv").write_text("nodes,time_s\n4,0\n2,7\n\n", encoding="utf-8")
    path = tmp_path / "experiment.toml"
    path.write_text('[cluster]\nnodes = 4\nchurn = { trace = "spot.csv", checkpoint_time = "1 s", restart_time = "2 s" }\n')
    experiment = Experiment.load(path)
    churn = experiment.cluster.churn
    assert churn is not None
    assert [(row.at, row.zone, row.nodes) for row in churn.trace] == [(0, "a", 2), (0, "b", 1), (90_500_000_000, "a", 3)]
    path.write_text(experiment.to_toml())
    (tmp_path / "spot.csv").unlink()
    assert Experiment.load(path) == experiment
    assert Experiment.load(path).digest() == experiment.digest()
    rows = _read({"trace": str(tmp_path / "one.csv")}).cluster.churn
    assert rows is not None
    assert [(row.at, row.zone, row.nodes) for row in rows.trace] == [(0, "", 4), (7 * 10**9, "", 2)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1 is not the header"),
        ("0,a,4\n", "line 1 is not the header"),
        ("time_s,zone,nodes\n0,a,4\n60,a\n", "line 3 has no time"),
        ("time_s,zone,nodes\n0,a,4\n\n60,a,4\n", "line 3 has no time"),
        ("time_s,zone,nodes\n0,a,4\n-1,a,4\n", "line 3 has no time"),
        ("time_s,zone,nodes\n0,a,-4\n", "line 2 has no time"),
        ("time_s,zone,nodes\n0,a,2.5\n", "line 2 has no time"),
        ("time_s,zone,nodes\n0,a,4\n60,a,3\n50,a,4\n", "line 4 of a CSV file) is earlier"),
        ("time_s,zone,nodes\n0,a,4\n60,a,3\n60,b,1\n60,a,2\n", "line 5 of a CSV file) names a zone twice"),
        ("time_s,zone,nodes\n0,a,2\n60,b,2\n90,a,3\n120,b,1\n", "line 4 of a CSV file) makes more nodes than cluster.nodes = 4"),
        ("time_s,zone,nodes\n0,a,2\n0,b,2\n", "no two different times"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    """Unsorted, negative, cut, of too many nodes, or of no time: each names the line and says what to do."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        _read({"trace": str(path)})
    assert says in str(caught.value)
    assert "cluster.churn.trace" in str(caught.value)
    assert "HINT" in str(caught.value)


def test_a_zone_may_grow_when_another_shrinks_at_the_same_time() -> None:
    """The order of rows of one time does not matter for the number of nodes."""
    rows = [(0, "a", 4), (60, "b", 4), (60, "a", 0), (90, "a", 0)]
    _read({"trace": [{"at": f"{at} s", "zone": zone, "nodes": nodes} for at, zone, nodes in rows]})


@pytest.mark.parametrize(
    ("churn", "place"),
    [
        ({}, "cluster.churn.trace"),
        ({"mean_up": "6 h", "trace": [{"at": "0 s", "nodes": 1}, {"at": "1 s", "nodes": 1}]}, "cluster.churn.trace"),
        ({"zones": 2, "trace": [{"at": "0 s", "nodes": 1}, {"at": "1 s", "nodes": 1}]}, "cluster.churn.zones"),
        ({"duration": "9 h", "trace": [{"at": "0 s", "nodes": 1}, {"at": "1 s", "nodes": 1}]}, "cluster.churn.duration"),
        ({"mean_up": "6 h", "least_nodes": 5}, "cluster.churn.least_nodes"),
        ({"mean_up": "6 h", "zones": 5}, "cluster.churn.zones"),
        ({"mean_up": "1 us"}, "cluster.churn.mean_up"),
        ({"mean_up": "50000 h"}, "cluster.churn.mean_up"),
        ({"mean_up": "6 h", "trace": "missing.csv"}, "cluster.churn.trace"),
    ],
)
def test_what_makes_no_sense_is_refused(churn: dict[str, Any], place: str) -> None:
    """Neither or both of trace and rates, rates beside a trace, and numbers out of bounds."""
    with pytest.raises(ConfigError) as caught:
        _read(churn)
    assert caught.value.where is not None
    assert caught.value.where.startswith(place)


def test_sites_beside_churn_are_refused() -> None:
    """A node that leaves would have to leave its site; zones stand for sites."""
    up = {"bandwidth": "1 Gbit/s", "latency": "1 ms"}
    cluster = {"nodes": 4, "sites": [{"nodes": 2, "count": 2, "up": up}], "churn": {**COSTS, "mean_up": "6 h"}}
    with pytest.raises(ConfigError, match=r"(?s)links between sites.*HINT.*zones") as caught:
        Experiment.from_dict({"cluster": cluster})
    assert caught.value.where == "cluster.churn"
