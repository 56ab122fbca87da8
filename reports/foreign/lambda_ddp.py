"""Samples a second of DistributedDataParallel on one machine: ``python reports/foreign/lambda_ddp.py --data FOLDER``.

Law: a step takes t(n) = t(1) (1 + x f(n)) at a fixed local batch, with f(n) = (2 (n - 1) / n) / f(2) of a ring, so f(2) = 1. x is the
exposed exchange on two GPUs over the compute, of the machine itself, pooled with those of the same model, precision, GPU and link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
from common import data_folder, header, score, write

RING = {1: 0.0, 2: 1.0, 4: 1.5, 8: 1.75}
"""f(n) where every GPU has its NVLink or switch."""
SHARED = {1: 0.0, 2: 1.0, 4: 2.1, 8: 2.9}
"""f(n) where GPUs share PCIe and the link between sockets at 0.7 and 0.6 of a pair's rate: assumed, no given row says it."""
SWITCHED = {"H100 SXM", "H200 SXM", "B200 SXM", "A100 SXM", "V100"}
MODELS_MILLIONS = {
    "bert_base_squad": 110, "bert_large_squad": 340, "gnmt": 160, "ncf": 31, "resnet50": 25.6, "ssd": 27, "tacotron2": 28,
    "transformerxlbase": 192, "transformerxllarge": 277, "waveglow": 88,
}  # fmt: skip
"""Parameters, for the rival."""
JUMPS = {"ncf", "bert_base_squad"}
"""Models of which some machines go faster than in proportion; their intervals are wider."""


def main() -> None:
    """Scores, then the predictions."""
    folder = data_folder("lambda_ddp")
    given = described(pd.read_csv(folder / "given.csv"))
    known = Known.of(given)
    two_from_one(known.up_to(2))
    eight_from_two(known)
    eight_of_another_node(known)
    rows = pd.read_csv(folder / "to_predict.csv")
    out = [predict(row, known) for row in described(rows).itertuples()]
    write("lambda_ddp", pd.concat([rows, pd.DataFrame(out, columns=["predicted", "low", "high"])], axis=1))


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """With the kind of GPU, the machine without its number of GPUs, and the era of the software."""
    rows = rows.copy()
    rows["kind"] = [kind(machine) for machine in rows.machine]
    rows["base"] = [base(machine) for machine in rows.machine]
    rows["cell"] = rows.suite + rows.precision + rows.model
    return rows.astype(dict.fromkeys(rows.columns[rows.dtypes == "str"], object))  # compared a million times: objects are faster


def kind(machine: str) -> str:
    """GPU and link."""
    name = machine.replace("_", " ")
    for gpu in ("H100", "H200", "GH200", "B200", "A100"):
        if re.search(rf"\b\d*x?{gpu}\b", name):
            return f"{gpu} {'PCIe' if 'PCIe' in name else 'SXM'}"
    return re.sub(r"^(LambdaCloud )?(\dx ?)?| \d+GB$", "", name)


def base(machine: str) -> str:
    """The name of a machine without its number of GPUs: of the second suite, its address."""
    if machine.startswith("LambdaOD"):
        return machine.rsplit("_", 2)[1] if not machine.endswith("bk") else machine
    return re.sub(r"\b\dx ?|(?<=_)\dx(?=[A-Z])", "", machine).strip()


@dataclass(frozen=True)
class Known:
    """Measurements, and log(rate(n) / (n rate(1))) of each machine that has both."""

    given: pd.DataFrame
    two: pd.DataFrame
    eight: pd.DataFrame

    @classmethod
    def of(cls, given: pd.DataFrame) -> Known:
        """Of a table of measurements."""
        return cls(given, exposed(given, 2), exposed(given, 8))

    def less(self, row: object, fewest: int) -> Known:
        """Without a machine's own measurements on so many GPUs and more."""
        own = (self.given.base == row.base) & (self.given.kind == row.kind) & (self.given.gpus >= fewest)
        tables = [table[~((table.base == row.base) & (table.kind == row.kind))] for table in (self.two, self.eight)]
        return Known(self.given[~own], tables[0] if fewest <= 2 else self.two, tables[1])

    def up_to(self, most: int) -> Known:
        """Without measurements on more GPUs."""
        return Known(self.given[self.given.gpus <= most], self.two, self.eight.iloc[:0] if most < 8 else self.eight)


def exposed(given: pd.DataFrame, num_gpus: int) -> pd.DataFrame:
    """log(rate(n) / (n rate(1))) of each machine that has both."""
    keys = ["suite", "precision", "model", "base", "kind", "cell"]
    one = given[given.gpus == 1].groupby(keys).samples_per_s.median()
    many = given[given.gpus == num_gpus].groupby(keys).samples_per_s.median()
    return np.log(many / (num_gpus * one)).dropna().rename("loss").reset_index()


def pooled(found: pd.DataFrame, row: object) -> tuple[float, float]:
    """Weighted median and deviation of log-efficiencies of the same model, by likeness of precision, suite, GPU and link."""
    found = found[found.model == row.model]
    weight = (
        np.where(found.precision == row.precision, 1.0, 0.15)
        * np.where(found.suite == row.suite, 1.0, 0.4)
        * np.where(found.kind == row.kind, 1.0, 0.15)
        * np.where(found.kind.isin(SWITCHED) == (row.kind in SWITCHED), 1.0, 0.4)
    )
    order = np.argsort(found.loss.to_numpy())
    share = np.cumsum(weight[order]) / weight.sum()
    losses = found.loss.to_numpy()[order]
    middle = losses[np.searchsorted(share, 0.5)]
    spread = (losses[min(np.searchsorted(share, 0.9), len(losses) - 1)] - losses[np.searchsorted(share, 0.1)]) / 2.56
    return float(middle), float(np.hypot(spread, 0.02 + 0.1 / np.sqrt(1 + 8 * weight.sum())))


def grown(loss: float, factor: float) -> float:
    """The log-efficiency when the exposed exchange of two GPUs grows by a factor."""
    return float(-np.log1p(max(np.expm1(-loss), 0.0) * factor) + max(loss, 0.0))


def efficiency(row: object, known: Known) -> tuple[float, float]:
    """log-efficiency of n GPUs and its deviation, from what two and eight GPUs of this and of like machines show."""
    law = RING if row.kind in SWITCHED else SHARED
    two = known.two
    like, like_deviation = pooled(two, row)
    own = two[(two.base == row.base) & (two.cell == row.cell) & (two.kind == row.kind)].loss
    if row.gpus == 2:
        return like, like_deviation
    at_two = 0.75 * own.median() + 0.25 * like if len(own) else like
    by_law = grown(at_two, law[row.gpus])
    deviation = 0.02 + 0.35 * abs(by_law) + (0 if len(own) else like_deviation)
    eight = known.eight
    eight = eight[(eight.model == row.model) & (eight.precision == row.precision)]
    if row.kind not in SWITCHED or not len(eight):
        return by_law, deviation
    of_eight, pairs = eight.loss.median(), pooled(two, eight.iloc[0].copy())[0]
    if row.gpus == 4:
        of_eight = min(0.0, pairs) + (of_eight - pairs) * (RING[4] - 1) / (RING[8] - 1) if of_eight < 0.1 else pairs
    elsewhere = 0.03 + 0.5 * abs(at_two - pairs) + (0.0 if row.suite == eight.suite.iloc[0] else 0.5 * max(of_eight, 0.0))
    if row.suite != eight.suite.iloc[0] and of_eight > 0.1:
        return by_law, deviation
    if row.suite == eight.suite.iloc[0] and row.kind == eight.kind.iloc[0]:
        elsewhere = 0.0075 + eight.loss.std()
    weight = deviation**2 / (deviation**2 + elsewhere**2)
    mixed = by_law + weight * (of_eight - by_law)
    return mixed, float(np.sqrt(1 / (1 / deviation**2 + 1 / elsewhere**2)) + 0.3 * weight * (1 - weight) * abs(of_eight - by_law))


def of_one(row: object, given: pd.DataFrame) -> tuple[float, float]:
    """Log of one GPU's rate and its deviation: of the machine, else of those with its GPU."""
    one = given[(given.gpus == 1) & (given.cell == row.cell)]
    alike = one[one.kind == row.kind]
    spread = float(np.log(alike.samples_per_s).std()) if len(alike) > 2 else 0.03
    own = alike[alike.base == row.base]
    if len(own):
        many = len(alike) > 10
        centre = 0.5 if many else 1.0
        level = centre * np.log(own.samples_per_s).mean() + (1 - centre) * np.log(alike.samples_per_s).median()
        return float(level), min(spread, 0.02)
    return float(np.log(alike.samples_per_s).median()), max(spread, 0.02)


def predict(row: object, known: Known) -> tuple[float, float, float]:
    """Median, 5 % and 95 % of a row."""
    one, one_deviation = of_one(row, known.given)
    loss, deviation = efficiency(row, known)
    middle = one + np.log(row.gpus) + loss
    given = known.given
    equal = given[(given.gpus == row.gpus) & (given.cell == row.cell) & (given.kind == row.kind)].samples_per_s
    if len(equal) > 2 and row.suite == "v2" and row.gpus == 8:
        middle = 0.5 * middle + 0.5 * np.log(equal.median())
    wide = 1.645 * np.hypot(one_deviation, deviation)
    up, down = wide, wide
    same = row.suite == "v2" and row.gpus == 8
    if row.model == "ncf":
        up, down = max(up, 0.5), max(down, 0.6)
    if row.model == "bert_base_squad" and row.precision == "fp16" and row.kind in SWITCHED:
        up, down = (up, down if row.kind == "H100 SXM" else 0.33) if same else (max(up, 0.36), down)
    return float(np.exp(middle)), float(np.exp(middle - down)), float(np.exp(middle + up))


def measured(given: pd.DataFrame, num_gpus: int) -> pd.DataFrame:
    """Rows of machines that have a rate on one GPU, too."""
    rows = given[given.gpus == num_gpus]
    have = set(map(tuple, given[given.gpus == 1][["base", "kind", "cell"]].to_numpy()))
    return rows[[(row.base, row.kind, row.cell) in have for row in rows.itertuples()]]


def two_from_one(known: Known) -> None:
    """Two GPUs of a machine whose own measurements on two are left out."""
    given = known.given
    cases = list(measured(given, 2).itertuples())
    truth = np.array([row.samples_per_s for row in cases])
    found = np.array([predict(row, known.less(row, 2)) for row in cases])
    ones = np.array([np.exp(of_one(row, given)[0]) for row in cases])
    header("Two GPUs from one, the machine's own two left out")
    score("ours", found[:, 0], truth, (found[:, 1], found[:, 2]))
    score("perfect scaling", 2 * ones, truth)
    score("ring: bytes over one bandwidth of a kind of machine, nothing hidden", np.array([ring(row, known) for row in cases]), truth)
    losses = known.two
    constant = np.array([losses[losses.base != row.base].loss.median() for row in cases])
    score("one efficiency for all", 2 * ones * np.exp(constant), truth)
    plain = np.array([row.model not in JUMPS for row in cases])
    score("ours, without ncf and bert_base", found[plain, 0], truth[plain], (found[plain, 1], found[plain, 2]))
    for name in sorted({row.kind for row in cases}):
        chosen = np.array([row.kind == name for row in cases])
        score(f"ours, {name}", found[chosen, 0], truth[chosen], (found[chosen, 1], found[chosen, 2]))


def ring(row: object, known: Known) -> float:
    """The rival: t(2) = t(1) + bytes / bandwidth, the bandwidth of like machines' median, this one left out."""
    given = known.given
    losses = known.two[known.two.base != row.base]
    losses = losses[losses.kind.isin(SWITCHED) == (row.kind in SWITCHED)]
    one = given[(given.gpus == 1)].groupby(["cell", "kind", "base"]).agg(rate=("samples_per_s", "median"), batch=("batch", "median"))
    losses = losses.merge(one.reset_index(), on=["cell", "kind", "base"]).dropna(subset=["batch"])
    seconds = np.expm1(-losses.loss) * losses.batch / losses.rate
    per_million = (seconds / losses.model.map(MODELS_MILLIONS)).median()
    rate = np.exp(of_one(row, given)[0])
    batch = row.batch / 2 if row.batch == row.batch else np.nan
    if np.isnan(batch):
        like = given[(given.gpus == 1) & (given.model == row.model) & (given.precision == row.precision)]
        batch = like.batch.max()
    step = batch / rate
    return float(2 * batch / (step + per_million * MODELS_MILLIONS[row.model]))


def eight_from_two(known: Known) -> None:
    """Eight GPUs of a machine from one and two, with no measurement on eight at all."""
    given, fewer = known.given, known.up_to(2)
    cases = list(measured(given, 8).itertuples())
    truth = np.array([row.samples_per_s for row in cases])
    found = np.array([predict(row, fewer) for row in cases])
    ones = np.array([np.exp(of_one(row, given)[0]) for row in cases])
    twos = np.array([np.exp(efficiency(row._replace(gpus=2), fewer)[0]) for row in cases])
    header("Eight GPUs from one and two, no measurement on eight")
    score("ours", found[:, 0], truth, (found[:, 1], found[:, 2]))
    score("perfect scaling", 8 * ones, truth)
    score("the efficiency of two", 8 * ones * twos, truth)
    score("that loss at every doubling", 8 * ones * twos**3, truth)


def eight_of_another_node(known: Known) -> None:
    """Eight GPUs of one of six nominally equal nodes from the other five."""
    given = known.given
    cases = list(measured(given, 8).itertuples())
    truth = np.array([row.samples_per_s for row in cases])
    rests = [known.less(row, 8) for row in cases]
    found = np.array([predict(row, rest) for row, rest in zip(cases, rests, strict=True)])
    others = [rest.given[(rest.given.gpus == 8) & (rest.given.cell == row.cell)] for row, rest in zip(cases, rests, strict=True)]
    medians = [other.samples_per_s.median() for other in others]
    header("Eight GPUs of a node from five nominally equal nodes")
    score("ours", found[:, 0], truth, (found[:, 1], found[:, 2]))
    score("median of the other five", np.array(medians), truth)
    ones = np.array([np.exp(of_one(row, given)[0]) for row in cases])
    score("perfect scaling", 8 * ones, truth)


if __name__ == "__main__":
    main()
