"""Microseconds of NCCL all-reduces, out of place, on Alps and on Argonne's machines: ``python reports/foreign/nccl.py --data FOLDER``.

Two laws, and NCCL's own rule between them. A tree takes a(S) + b(S) log2(nodes). A ring of n ranks takes (n - 1) h(S / n), where h is
what two steps take with so many bytes: a floor of latency, then bytes over bandwidth. ``takes_ring`` is the comparison of NCCL's tuner
(src/graph/tuning.cc; its tree's correction factors are read from ``sim.network.nccl``) with one constant, MB a node, read from sizes at
which the given times jump. Rivals: ring, tree and alpha-beta in closed form with the same fit, and ``sim.network.nccl`` itself.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from common import data_folder, header, score, write

from fleetbench.cluster import Link
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from sim.network.links import Links
from sim.network.nccl import GENERATIONS, TREE_CORRECTION, Nccl

MIB = 2**20
GPUS = 4
"""Of a node, of Alps and of Polaris."""
PER_NODE = {"alps": 1.4, "polaris": 0.8}
"""Millions of bytes by which a ring's latency grows with each node, in NCCL's comparison: sizes at which times jump allow 1.2 to 1.6
(Alps) and 0.6 to 1.2 (Polaris)."""
SLOW_LL = (2**16, 2**20)
"""Between them rings of LL on 2 and 4 nodes are slow; trees are taken from 8 nodes on."""
POOLED = {"NCCL_IGNORE_CPU_AFFINITY_1": "default"}
"""Settings that change nothing that is seen."""


def main() -> None:
    """Scores and predictions of both sets."""
    folder = data_folder("")
    alps(folder / "alps_nccl")
    argonne(folder / "alcf_nccl")


def takes_ring(num_bytes: int, nodes: int, where: str) -> bool:
    """Whether NCCL's comparison takes a ring, of the protocol Simple, for a buffer."""
    return nodes > 2 and for_ring(num_bytes, nodes, where) > 1


def for_ring(num_bytes: int, nodes: int, where: str) -> float:
    """What a ring's bandwidth gains over a tree's, over what its latency costs."""
    ranks = GPUS * nodes
    power = num_bytes.bit_length() - 7
    correction = TREE_CORRECTION["Simple"][power] if power < len(TREE_CORRECTION["Simple"]) else 1.0
    of_ring = 0.92 * 2 * (ranks - 1) / ranks / 2
    return num_bytes / 1e6 * (1 / (of_ring * correction) - 1) / (PER_NODE[where] * nodes)


class Laws:
    """Tree and ring through the times of one setting, a map from (nodes, bytes) to us."""

    def __init__(self, times: dict[tuple[int, int], float], where: str) -> None:
        self.times, self.where = times, where
        self.nodes = sorted({nodes for nodes, _ in times if nodes > 1})
        self.sizes = sorted({size for _, size in times})

    def predict(self, nodes: int, num_bytes: int) -> float:
        """Us."""
        if (nodes, num_bytes) in self.times:
            return self.times[nodes, num_bytes]
        return self.ring(nodes, num_bytes) if takes_ring(num_bytes, nodes, self.where) else self.tree(nodes, num_bytes)

    def ring(self, nodes: int, num_bytes: int) -> float:
        """(n - 1) h(S / n), h as at the measured numbers of nodes, between their sizes in log-log."""
        share = num_bytes / (GPUS * nodes)
        found = []
        for known in self.nodes:
            sizes = [size for size in self.sizes if takes_ring(size, known, self.where)]
            if sizes and known > 2:
                at = np.log([size / (GPUS * known) for size in sizes])
                h = np.log([self.times[known, size] / (GPUS * known - 1) for size in sizes])
                beyond = max(np.log(share) - at[-1], 0.0)
                found.append(np.interp(np.log(share), at, h) + beyond)
        if not found:
            return self.tree(nodes, num_bytes)
        return float((GPUS * nodes - 1) * np.exp(np.mean(found)))

    def tree(self, nodes: int, num_bytes: int) -> float:
        """a(S) + b(S) log2(nodes)."""
        longest = max(size for size in self.sizes if not takes_ring(size, self.nodes[-1], self.where))
        if num_bytes > longest:
            at_best = self.times[self.nodes[-1], self.sizes[-1]] / self.sizes[-1]  # a tree so long was not given: as fast as the ring
            return self.tree(nodes, longest) + (num_bytes - longest) * at_best
        if SLOW_LL[0] <= num_bytes <= SLOW_LL[1] and nodes >= 8 > self.nodes[-1]:
            before, after = SLOW_LL[0] // 2, SLOW_LL[1] * 2
            of_ll = self.tree(nodes, before) * (num_bytes / before) ** 0.4
            return min(of_ll, self.tree(nodes, after) * (num_bytes / after) ** 0.25)
        level, slope = self.line(num_bytes)
        return max(level + slope * np.log2(nodes), 1.0)

    def line(self, num_bytes: int) -> tuple[float, float]:
        """A and b of a size, from the numbers of nodes on which it went through a tree; with one of them, b of like sizes."""
        known = self.by_tree(num_bytes)
        if len(known) > 1:
            times = np.array([self.times[node, num_bytes] for node in known])
            slope, level = np.polyfit(np.log2(known), times, 1, w=1 / times)
            return float(level), float(slope)
        node = (known or self.nodes)[-1]
        slope = self.slope_alike(num_bytes)
        return self.times[node, num_bytes] - slope * np.log2(node), slope

    def by_tree(self, num_bytes: int) -> list[int]:
        """Numbers of nodes on which a size went through a tree: not those of the slow rings, and none that takes longer than more nodes."""
        known = [node for node in self.nodes if not takes_ring(num_bytes, node, self.where)]
        if SLOW_LL[0] <= num_bytes <= SLOW_LL[1]:
            known = [node for node in known if node >= 8] or known[-1:]
        elif len(self.nodes) == 1:
            known = [1, *known]
        return [node for node in known if all(self.times[node, num_bytes] < self.times[more, num_bytes] for more in known if more > node)]

    def slope_alike(self, num_bytes: int) -> float:
        """B between the sizes that have it."""
        sizes = [size for size in self.sizes if len(self.by_tree(size)) > 1 and size <= 8 * MIB]
        slopes = [max(self.line(size)[1], 0.1) for size in sizes]
        beyond = 0.5 * max(np.log(num_bytes / sizes[-1]), 0.0)
        return float(np.exp(np.interp(np.log(num_bytes), np.log(sizes), np.log(slopes)) + beyond))


def times_of(given: pd.DataFrame) -> dict[tuple[int, int], float]:
    """Us by (nodes, bytes): the geometric mean of repetitions, and the lower ones where they differ by more than a quarter."""
    found = {}
    for (nodes, size), cell in given.groupby(["nodes", "bytes"]):
        values = np.sort(cell.oop_us.to_numpy())
        values = values[values <= 1.25 * values[0]]
        found[int(nodes), int(size)] = float(np.exp(np.log(values).mean()))
    return found


def deviation(nodes: int, num_bytes: int, known: int) -> tuple[float, float]:
    """Of log(us), down and up: what was missed with sizes left out, growing with every doubling of the nodes."""
    doublings = max(np.log2(nodes / known), 0.0)
    if num_bytes < SLOW_LL[0]:
        own = 0.04
    elif num_bytes <= SLOW_LL[1]:
        own = 0.16
    elif num_bytes <= 8 * MIB:
        own = 0.06
    elif num_bytes < 512 * MIB:
        own = 0.18 if num_bytes < 256 * MIB else 0.08
    else:
        own = 0.015
    near = 0.25 if num_bytes > 8 * MIB and MIB / 2 <= num_bytes / (GPUS * nodes) <= 4 * MIB else 0.0
    near = 0.35 if nodes not in (1, 2, 4, 16) and 0.7 < for_ring(num_bytes, nodes, "alps") < 1.4 else near * min(doublings, 1)
    return np.hypot(own, near) + 0.025 * doublings, np.hypot(own, near) + 0.06 * doublings


def alps(folder: object) -> None:
    """Of Alps."""
    given = pd.read_csv(folder / "given.csv")
    given["alike"] = given.setting.replace(POOLED)
    rows = pd.read_csv(folder / "to_predict.csv")
    rows["alike"] = rows.setting.replace(POOLED)
    for left, used in ((16, (1, 4)), (16, (1, 2, 4)), (4, (1, 2, 16))):
        _left_out(given, left, used)
    laws = {alike: Laws(times_of(part), "alps") for alike, part in given.groupby("alike")}
    out = []
    for row in rows.itertuples():
        middle = laws[row.alike].predict(row.nodes, row.bytes)
        down, up = deviation(row.nodes, row.bytes, 16)
        if row.alike.startswith("FI_HMEM"):
            down, up = down + (0.3 if row.bytes >= 64 * MIB and row.nodes > 16 else 0.0), up + 0.25
        out.append((middle, middle * np.exp(-1.645 * down), middle * np.exp(1.645 * up)))
    rows = pd.concat([rows, pd.DataFrame(out, columns=["predicted", "low", "high"])], axis=1)
    _best(rows)
    write("alps_nccl", rows.drop(columns="alike"))


def _left_out(given: pd.DataFrame, left: int, used: tuple[int, ...]) -> None:
    """Scores on a number of nodes that is left out."""
    header(f"Alps, {GPUS * left} GPUs from {', '.join(str(GPUS * nodes) for nodes in used)}")
    cases, ours, rivals = [], [], {"ring": [], "tree": [], "alpha-beta": [], "nearest": [], "product": []}
    bounds = []
    for alike, part in given.groupby("alike"):
        known = part[part.nodes.isin(used)]
        laws, forms = Laws(times_of(known), "alps"), closed_forms(times_of(known))
        for row in part[part.nodes == left].itertuples():
            cases.append(row)
            ours.append(laws.predict(left, row.bytes))
            down, up = deviation(left, row.bytes, max(used))
            up += 0.25 if alike.startswith("FI_HMEM") else 0
            bounds.append((ours[-1] * np.exp(-1.645 * down), ours[-1] * np.exp(1.645 * up)))
            for name, form in forms.items():
                rivals[name].append(form(GPUS * left, left, row.bytes))
            rivals["nearest"].append(laws.times[max(node for node in used if node <= left), row.bytes])
            rivals["product"].append(product(left, row.bytes))
    truth = np.array([row.oop_us for row in cases])
    size = np.array([row.bytes for row in cases])
    score("ours", np.array(ours), truth, tuple(np.array(bounds).T))
    for name, found in rivals.items():
        score(
            {"nearest": "as on the next fewer", "product": "sim.network.nccl, declared 4 x 200 Gbit/s"}.get(name, name),
            np.array(found),
            truth,
        )
    for label, low, high in (
        ("8 B to 32 KiB", 0, 2**15),
        ("64 KiB to 1 MiB", 2**16, 2**20),
        ("2 to 32 MiB", 2**21, 2**25),
        ("64 MiB and more", 2**26, 2**40),
    ):
        chosen = (size >= low) & (size <= high)
        score(f"ours, {label}", np.array(ours)[chosen], truth[chosen], tuple(np.array(bounds)[chosen].T))


def closed_forms(times: dict[tuple[int, int], float]) -> dict[str, object]:
    """Ring, tree and alpha-beta with coefficients of at least zero by least relative squares over all given cells."""
    from scipy.optimize import nnls

    features = {
        "ring": lambda ranks, _, size: (1.0, 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size / 1e6),
        "tree": lambda _, nodes, size: (1.0, np.log2(max(nodes, 1)), (1 + (nodes > 1)) * size / 1e6),
        "alpha-beta": lambda _ranks, _nodes, size: (1.0, size / 1e6, 0.0),
    }
    cells = [(GPUS * nodes, nodes, size) for nodes, size in times]
    measured = np.array(list(times.values()))
    found = {}
    for name, feature in features.items():
        form = np.array([feature(*cell) for cell in cells]) / measured[:, None]
        coefficients = nnls(form, np.ones(len(cells)))[0]
        found[name] = lambda ranks, nodes, size, f=feature, c=coefficients: float(np.dot(f(ranks, nodes, size), c))
    return found


def product(nodes: int, num_bytes: int, gpus: int = GPUS, gbps: int = 200, generation: str = "nccl-hopper") -> float:
    """Us by the product's model of NCCL, nothing fitted: an interface a GPU, 150 GB/s inside a node."""
    gbit = 10**9
    links = Links(
        trainers_per_node=gpus,
        nics_per_node=gpus,
        nodes=nodes,
        intra=Link(bandwidth=BitsPerSecond(1200 * gbit)),
        inter=Link(bandwidth=BitsPerSecond(gbps * gbit), latency=Nanoseconds(0)),
    )
    model = Nccl(GENERATIONS[generation], "all_reduce", range(gpus * nodes), links)
    return float(model.choice(num_bytes).total_ns(num_bytes)) / 1e3


def _best(rows: pd.DataFrame) -> None:
    """The setting with the shortest predicted times at the largest scale, by class of size."""
    largest = rows[rows.nodes == rows.nodes.max()].copy()
    bins = [0, 2**11, 2**17, 2**20, 2**23, 2**28, 2**40]
    labels = ["8 B to 2 KiB", "4 to 128 KiB", "256 KiB to 1 MiB", "2 to 8 MiB", "16 to 256 MiB", "512 MiB to 4 GiB"]
    largest["size_class"] = pd.cut(largest.bytes, bins, labels=labels)
    shares = (
        largest.groupby(["size_class", "alike", "bytes"], observed=True)
        .predicted.mean()
        .groupby(level=["size_class", "bytes"], observed=True)
    )
    relative = shares.transform(lambda times: times / times.min()).groupby(level=["size_class", "alike"], observed=True).mean().unstack()  # noqa: PD010 - a series of two levels
    print(f"\nPredicted time over that of the best setting, {GPUS * rows.nodes.max()} GPUs\n")
    relative.columns = [name[:22] for name in relative.columns]
    print(relative.round(3).to_string())


def argonne(folder: object) -> None:
    """Of Polaris, Sirius and Sophia: two nodes of a setup grow as the tuned setup does, then by the laws."""
    given = pd.read_csv(folder / "given.csv").query("op == 'all_reduce'")
    grown(given)
    measured = {key: times_of(part) for key, part in given.groupby(["nccl", "setup"])}
    old, new = measured["nccl_2_18", 5], measured["nccl_2_21", 5]
    rows = pd.read_csv(folder / "to_predict.csv")
    out = []
    for row in rows.itertuples():
        keys = [key for key in (("nccl_2_18", row.setup), ("nccl_2_21", row.setup)) if key in measured]
        if row.system == "sophia":
            middle = product(2, row.bytes, 8, 200, "nccl-ampere") * old[2, row.bytes] / product(2, row.bytes, 4, 100, "nccl-ampere")
            out.append((middle, middle / 3, middle * 4))
            continue
        if row.setup == 1:
            keys = keys[:1]
        elif row.nodes == 256:
            keys = keys[-1:]
        found = []
        for key in keys:
            times = dict(measured[key])
            for size in {size for _, size in times}:
                times.setdefault((8, size), eight(times[2, size], old[2, size], old[8, size], tuned=row.setup >= 3))
            found.append(Laws(times, "polaris").predict(row.nodes, row.bytes))
        if row.setup == 5 and row.nodes == 8:
            found = [old[8, row.bytes] * (new[2, row.bytes] / old[2, row.bytes]) ** 0.5]
        middle = float(np.exp(np.log(found).mean()))
        out.append((middle, *around(middle, row)))
    rows = pd.concat([rows, pd.DataFrame(out, columns=["predicted", "low", "high"])], axis=1)
    for _, part in rows[rows.system == "sirius"].groupby("setup"):  # another machine: between neighbouring sizes
        logs = np.log(part[["predicted", "low", "high"]])
        rows.loc[part.index, logs.columns] = np.exp(0.6 * logs + 0.2 * logs.shift(1).fillna(logs) + 0.2 * logs.shift(-1).fillna(logs))
    write("alcf_nccl", rows)


def eight(two: float, tuned_two: float, tuned_eight: float, *, tuned: bool) -> float:
    """Us on eight nodes from two, as the tuned setup grows: in proportion; for plain TCP half of it by as many us."""
    proportional = two * tuned_eight / tuned_two
    return proportional if tuned or tuned_two < 100 else float(np.sqrt(proportional * max(two + tuned_eight - tuned_two, two)))


def around(middle: float, row: object) -> tuple[float, float]:
    """5 % and 95 %: one other machine, one other setup, then more for every doubling of nodes."""
    doublings = max(np.log2(row.nodes / 8), 0)
    own = 0.15 if row.system == "sirius" or row.nodes == 8 else 0.2
    own += 0.1 if SLOW_LL[0] <= row.bytes <= 64 * MIB else 0.0
    own += 0.2 if row.setup <= 2 else 0.0
    return middle * np.exp(-1.645 * (own + 0.03 * doublings)), middle * np.exp(
        1.645 * (own + 0.07 * doublings + (0.2 if row.setup == 1 else 0))
    )


def grown(given: pd.DataFrame) -> None:
    """The only larger size that was given, eight nodes of the tuned setup, from two of it and the growth on Alps."""
    times = times_of(given[(given.nccl == "nccl_2_18") & (given.setup == 5)])
    sizes = sorted({size for _, size in times})
    two, truth = {(2, size): times[2, size] for size in sizes}, np.array([times[8, size] for size in sizes])
    alps_given = pd.read_csv(data_folder("alps_nccl") / "given.csv")
    laws = Laws(times_of(alps_given[alps_given.setting == "default"]), "alps")
    growth = np.array([laws.predict(8, max(size, 8)) / laws.predict(2, max(size, 8)) for size in sizes])
    found = growth * np.array(list(two.values()))
    header("Polaris, 32 GPUs from 8, tuned setup")
    score("ours: as Alps grows from 8 to 32 GPUs", found, truth, (found * np.exp(-0.5), found * np.exp(0.5)))
    for name, form in closed_forms(two).items():
        score(name, np.array([form(32, 8, size) for size in sizes]), truth)
    score("as on the next fewer", np.array(list(two.values())), truth)
    score("sim.network.nccl, declared 2 x 200 Gbit/s", np.array([product(8, size, 4, 100, "nccl-ampere") for size in sizes]), truth)


if __name__ == "__main__":
    main()
