"""NCCL on many nodes: ``python reports/nccl_model/nodes.py --data FOLDER [--before FILE]`` prints README's tables, writes ``nodes.csv``.

Measured by others on Alps and Polaris; a number of nodes is left out and predicted from the others, or from nothing but the declared
cluster. FOLDER has alps_nccl/given.csv and alcf_nccl/given.csv, which state no licence: only scores are written. FILE is
sim/network/nccl.py of an earlier commit, whose model is then scored, too. Rivals are fitted to the same rows.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fleetbench.cluster import Link, Measured
from fleetbench.measurements import CollectivePoint
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from sim.network.links import Links
from sim.network.routes import way

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "foreign"))
from nccl import Laws, closed_forms, times_of  # noqa: E402  # reports/foreign is no package

Times = dict[tuple[int, int], float]
Model = Callable[[int, int], float]
GBIT, MIB = 10**9, 2**20
POOLED = {"NCCL_IGNORE_CPU_AFFINITY_1": "default"}
CLASSES = {"to 2 KiB": (0, 2**11), "4 to 32 KiB": (2**12, 2**15), "64 KiB to 1 MiB": (2**16, 2**20), "2 to 32 MiB": (2**21, 2**25),
           "from 64 MiB": (2**26, 2**40)}  # fmt: skip
ALPS = {"generation": "nccl-hopper", "gpus": 4, "gbytes": 450, "nics": 4, "gbit": 200}
POLARIS = {"generation": "nccl-ampere", "gpus": 4, "gbytes": 300, "nics": 2, "gbit": 200}
"""As declared: GB/s of NVLink each way, interfaces of a node, Gbit/s of each."""
FABRIC = {"alps": {"simple_us": 42, "efficiency": 0.92}, "polaris": {"simple_us": 48, "efficiency": 0.74}}
"""What was read from given rows: the time of a ring's step where it no longer falls, and bus bandwidth at the largest sizes."""


def links(
    generation: str, gpus: int, gbytes: float, nics: int, gbit: float, *, simple_us: float | None = None, efficiency: float | None = None,
    declared: Sequence[Measured] = (), **environment: str,
) -> Links:  # fmt: skip
    """Of nodes with so many GPUs."""
    simple = None if simple_us is None else Nanoseconds(round(simple_us * 1e3))
    inter = Link(bandwidth=BitsPerSecond(round(gbit * GBIT)), efficiency=efficiency, simple_latency=simple)
    return Links(
        trainers_per_node=gpus,
        nics_per_node=nics,
        intra=Link(bandwidth=BitsPerSecond(round(gbytes * 8 * GBIT))).carried("nccl", between_nodes=False),
        inter=inter.carried("nccl", between_nodes=True),
        collective=generation,
        declared=tuple(declared),
        environment=environment,
    )


def product(times: Times, kind: Any = "all_reduce", **fields: Any) -> Model:
    """Us by the simulator, with measured times of some numbers of nodes, or with none."""
    known = [
        Measured(
            kind=kind,
            trainers=fields["gpus"] * nodes,
            points=tuple(
                CollectivePoint(nbytes=Bytes(size), took=Nanoseconds(round(us * 1e3))) for (own, size), us in times.items() if own == nodes
            ),
        )
        for nodes in sorted({nodes for nodes, _ in times})
    ]
    found: dict[int, Any] = {}

    def us(nodes: int, size: int) -> float:
        if nodes not in found:
            found[nodes] = way(kind, range(fields["gpus"] * nodes), links(**fields, declared=known))
        return float(found[nodes].route(size).cost.total_ns) / 1e3

    return us


def before(module: Any, kind: Any = "all_reduce", **fields: Any) -> Model:
    """Us by an earlier model, which took all that a link's framing leaves."""

    def us(nodes: int, size: int) -> float:
        own = links(**fields, efficiency=1.0)
        model = module.Nccl(module.GENERATIONS[fields["generation"]], kind, range(fields["gpus"] * nodes), own)
        return float(model.choice(size).total_ns(size)) / 1e3

    return us


def scored(case: str, name: str, model: Model, rows: pd.DataFrame, out: list[list[Any]]) -> None:
    """Add absolute relative errors in percent: of all rows, and of each class of sizes."""
    errors = np.array([abs(model(row.nodes, row.bytes) / row.oop_us - 1) * 100 for row in rows.itertuples()])
    parts = [errors[(rows.bytes >= low) & (rows.bytes <= high)] for low, high in CLASSES.values()]
    out.append([case, name, len(errors), np.median(errors), errors.mean(), np.percentile(errors, 95), *(part.mean() for part in parts)])


def left_out(given: pd.DataFrame, left: int, used: Sequence[int], fields: dict[str, Any], where: str) -> Iterator[tuple[str, Model]]:
    """All that predict a number of nodes from others."""
    known = times_of(given[given.nodes.isin(used)])
    yield "simulator, with logs", product(known, **fields)
    if where == "alps":
        yield "laws of reports/foreign", Laws(known, where).predict
    for name, form in closed_forms(known).items():
        yield name, lambda nodes, size, form=form: form(4 * nodes, nodes, size)
    most = max(nodes for nodes in used if nodes <= left)
    yield "as on the next fewer", lambda _, size: known[most, size]


def pooled(case: str, parts: Sequence[tuple[pd.DataFrame, list[tuple[str, Model]]]], out: list[list[Any]]) -> None:
    """Scores over settings, each of which has models of its own."""
    for index, (name, _) in enumerate(parts[0][1]):
        rows = pd.concat([part.assign(setting=str(number)) for number, (part, _) in enumerate(parts)], ignore_index=True)
        found = {(str(number), row.nodes, row.bytes): models[index][1](row.nodes, row.bytes) for number, (part, models) in enumerate(parts) for row in part.itertuples()}  # fmt: skip  # noqa: E501
        rows["predicted"] = [found[row.setting, row.nodes, row.bytes] for row in rows.itertuples()]
        by_row = iter(rows.predicted)
        scored(case, name, lambda *_, by_row=by_row: next(by_row), rows, out)


def main() -> None:
    """Everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    module = None
    if arguments.before is not None:
        spec = importlib.util.spec_from_file_location("before", arguments.before)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["before"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    alps = pd.read_csv(arguments.data / "alps_nccl" / "given.csv")
    alps["setting"] = alps.setting.replace(POOLED)
    polaris = pd.read_csv(arguments.data / "alcf_nccl" / "given.csv").query("nccl == 'nccl_2_18' and setup == 5 and bytes > 0")
    fabric = {"alps": ALPS | FABRIC["alps"], "polaris": POLARIS | FABRIC["polaris"]}
    out: list[list[Any]] = []
    for left, used in ((16, (1, 4)), (16, (1, 2, 4)), (4, (1, 2, 16)), (2, (1, 4, 16))):
        case = f"alps, {4 * left} GPUs from {', '.join(str(4 * nodes) for nodes in used)}"
        own = fabric["alps"] | {"NCCL_PROTO": "^LL128"}
        parts = [(part[part.nodes == left], list(left_out(part, left, used, own, "alps"))) for _, part in alps.groupby("setting")]
        pooled(case, parts, out)
    reduced = polaris.query("op == 'all_reduce'")
    for name, model in left_out(reduced, 8, (2,), fabric["polaris"] | {"NCCL_PROTO": "^LL128"}, "polaris"):
        scored("polaris, 32 GPUs from 8", name, model, reduced.query("nodes == 8"), out)
    for where, rows, plain in (("alps", alps.query("setting == 'default'"), ALPS), ("polaris", reduced, POLARIS)):
        for nodes, part in rows.groupby("nodes"):
            case = f"{where}, {4 * nodes} GPUs, declared"
            if module is not None:
                scored(case, "before", before(module, **plain), part, out)
            scored(case, "declared rates alone", product({}, **plain), part, out)
            scored(case, "and the fabric's fields", product({}, **fabric[where], NCCL_PROTO="^LL128"), part, out)
    gathered = polaris.query("op == 'all_gather'")
    for nodes, part in gathered.groupby("nodes"):
        case = f"polaris, {4 * nodes} GPUs, all-gather, declared"
        if module is not None:
            scored(case, "before", before(module, "all_gather", **POLARIS), part, out)
        scored(case, "and the fabric's fields", product({}, "all_gather", **fabric["polaris"], NCCL_PROTO="^LL128"), part, out)
    names = ["case", "model", "n", "median", "mean", "p95", *CLASSES]
    with (HERE / "nodes.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *([*row[:3], *(f"{value:.1f}" for value in row[3:])] for row in out)])
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in out:
        print(f"| {row[0]} | {row[1]} | {row[2]} | " + " | ".join(f"{value:.1f}" for value in row[3:]) + " |")
    published(module)


H100 = {"generation": "nccl-hopper", "gpus": 8, "gbytes": 450, "nics": 8, "gbit": 400}
A100 = {"generation": "nccl-ampere", "gpus": 8, "gbytes": 300, "nics": 8, "gbit": 200}
RING = {"NCCL_ALGO": "Ring"}
SIMPLE = RING | {"NCCL_PROTO": "Simple"}
GIB = 2**30
PUBLISHED: list[tuple[str, dict[str, Any], int, int, float, str]] = [
    ("8 H100, 8 GiB: 480 GB/s of bus bandwidth", H100, 1, 8 * GIB, 1.75 * 8 * GIB / 480e3, "nccl-tests 212"),
    ("the same, NCCL_ALGO=Ring: 365 GB/s", H100 | RING, 1, 8 * GIB, 1.75 * 8 * GIB / 365e3, "nccl-tests 212"),
    ("8 H800, 8 GiB: 215 GB/s", H100 | {"gbytes": 200}, 1, 8 * GIB, 1.75 * 8 * GIB / 215e3, "nccl 1374"),
    ("2 nodes of 8 H20, 8 B", H100, 2, 8, 47, "nccl 1244"),
    ("16 nodes of 8 H100, 8 B", H100, 16, 8, 62, "nccl 1469"),
    ("the same, 4 KiB", H100, 16, 4096, 77, "nccl 1469"),
    ("the same, 64 MiB: 150 GB/s", H100, 16, 64 * MIB, 2 * 127 / 128 * 64 * MIB / 150e3, "nccl 1469"),
    ("5 nodes of 8 H100, 4 x 400 Gbit/s, Ring, 1 MiB", H100 | {"nics": 4} | RING, 5, MIB, 354.9, "nccl 1368"),
    ("the same, 1 GiB: 190 GB/s", H100 | {"nics": 4} | RING, 5, GIB, 2 * 39 / 40 * GIB / 190e3, "nccl 1368"),
    ("the same, Tree, 1 GiB: 150 GB/s", H100 | {"nics": 4, "NCCL_ALGO": "Tree"}, 5, GIB, 2 * 39 / 40 * GIB / 150e3, "nccl 1368"),
    ("3 nodes of 8 A100, 4 x 200 Gbit/s, 32 MiB", A100 | {"nics": 4}, 3, 33_554_440, 732.9, "nccl-tests 119"),
    ("248 nodes of 8 H200, 512 MiB: 350 GB/s", H100, 248, 512 * MIB, 2 * 512 * MIB / 350e3, "nccl-tests 283"),
    *(
        (f"128 nodes of 8, a Simple ring, {size} GiB", H100 | SIMPLE, 128, size * GIB, us, "nccl-tests 322")
        for size, us in ((1, 19_355), (2, 20_218), (4, 25_377), (8, 47_078), (16, 93_457))
    ),
]
"""Of github.com/NVIDIA, by repository and number of the issue; us. Where it does not say, 8 x 400 Gbit/s of InfiniBand are assumed."""


def published(module: Any) -> None:
    """What NCCL's maintainers and users published, with nothing declared but rates."""
    print("\n| all-reduce | source | published, us | now | before |\n|---|---|---|---|---|")
    for name, fields, nodes, size, us, source in PUBLISHED:
        now = f"{product({}, **fields)(nodes, size):.0f} ({product({}, **fields)(nodes, size) / us - 1:+.0%})"
        plain = {key: value for key, value in fields.items() if not key.startswith("NCCL")}
        earlier = "" if module is None else f"{before(module, **plain)(nodes, size) / us - 1:+.0%}"
        print(f"| {name} | {source} | {us:.0f} | {now} | {earlier} |")


if __name__ == "__main__":
    main()
