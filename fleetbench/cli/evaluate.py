"""``fleetbench evaluate``: an exported model's outputs over a data set, compared with those of a service.

Outputs are stored as vectors: a Parquet file with the columns ``id`` (text or whole numbers) and ``vector``
(lists of float32, all of one length).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.cli import progress
from fleetbench.cli.options import Commands, add_command, add_json, add_overrides, load_with_notes, number, whole
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.digests import atomic_write, reading, writing
from fleetbench.errors import ConfigError, GateFailed

if TYPE_CHECKING:
    import pandas as pd

TOLERANCE = 1e-4
"""Default tolerance, as a share: above sums of float32 in another order, below half precision."""
WORST = 10


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "evaluate", "write an exported model's output over a data set; compare a service's", run)
    model = "what fleet.save_inference_model or torch.export.save wrote; or vectors that are there, in Parquet"
    parser.add_argument("model", type=Path, metavar="MODEL.pt2", help=model)
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT.toml", help="its data are evaluated; default: the built-in quickstart")
    add_overrides(parser, "of the file, such as workload.batch_size=64")
    parser.add_argument("--seed", type=int, metavar="N", help="the same as --set run.seed=N")
    parser.add_argument("--samples", type=whole(1), metavar="N", help="the first N samples only; default: all")
    parser.add_argument("--to", type=Path, metavar="FILE.parquet", help="keep the model's vectors in this file")
    service = "compare with what a service returned for the same samples, in Parquet; exit with 1 beyond the tolerance"
    parser.add_argument("--against", type=Path, metavar="ONLINE.parquet", help=service)
    gate = f"largest difference that passes, as a share of the offline vector's largest magnitude; default: {TOLERANCE:g}"
    parser.add_argument("--tolerance", type=number("a share of at least 0", 0), default=TOLERANCE, metavar="X", help=gate)
    parser.set_defaults(strategy=None)
    add_json(parser, "the comparison's figures")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, compare, or both.

    Raises ``GateFailed`` for differences beyond the tolerance, after printing the comparison.
    """
    if arguments.against is None and arguments.to is None:
        hint = "--to FILE.parquet keeps the vectors, --against ONLINE.parquet compares them"
        raise ConfigError("nothing is asked for", "evaluate", str(arguments.model), hint)
    online = None if arguments.against is None else read_vectors(arguments.against)  # read first: the evaluation may take hours
    offline = evaluated(arguments) if arguments.model.suffix == ".pt2" else read_vectors(arguments.model)
    if arguments.to is not None:
        write_vectors(arguments.to, offline)
    if online is None:
        return 0
    found = compare(offline, online, arguments.against)
    num_past = int((~(found["largest"] <= arguments.tolerance)).sum())
    summary: dict[str, Any] = {"samples": len(found), "length": offline.shape[1], "tolerance": arguments.tolerance, "num_past": num_past}
    summary["num_equal"] = int((found["largest"] == 0).sum())
    summary |= {name: {"max": found[name].max(skipna=False), "mean": found[name].mean(skipna=False)} for name in ("largest", "euclidean")}
    worst = found.sort_values("largest", ascending=False, na_position="first").head(WORST)
    if arguments.json:
        text = json.dumps(summary | {"worst": worst.reset_index().to_dict("records")})
        emit(json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1))
    else:
        table = new_table("the worst samples: shares of the offline norm", "sample", "largest", "at number", "Euclidean")
        for sample, row in worst.iterrows():
            table.add_row(str(sample), f"{row['largest']:.2e}", f"{row['at']:.0f}", f"{row['euclidean']:.2e}")
        emit_table(table)
        verdict = f"{num_past:,} past" if num_past else "all within"
        emit(f"{len(found):,} samples ({summary['num_equal']:,} equal): {verdict} the tolerance of {arguments.tolerance:g}")
    if num_past:
        hint = "up to 1e-5 is the order of float32 sums, up to 1e-2 half precision; more: another checkpoint, preprocessing or layer"
        what = f"{num_past} of {len(found)} samples differ by more than {arguments.tolerance:g}"
        raise GateFailed(what, "evaluate --against", f"worst: {worst.index[0]!r}", hint)
    return 0


def evaluated(arguments: argparse.Namespace) -> pd.DataFrame:
    """Return the exported model's outputs for the experiment's samples, a row each, in the order of the data.

    The index has the samples' positions or paths.
    """
    import numpy as np
    import pandas as pd
    import torch

    from fleetbench.workloads.data.evaluated import samples_of

    experiment, notes = load_with_notes(arguments)
    for text in notes:
        say(f"note: {text}")
    ids, read = samples_of(experiment.workload, experiment.run.seed)
    num = arguments.samples or len(ids)
    if num > len(ids):
        raise ConfigError("is more than the data have", "--samples", str(num), f"at most {len(ids)}, or omit it for all")
    with reading(arguments.model, "an exported model: fleet.save_inference_model or torch.export.save write one", Exception):
        model = torch.export.load(arguments.model).module()
    outputs, size = [], experiment.workload.batch_size
    with progress.steps("evaluate") as advance, torch.inference_mode():
        for first in range(0, num, size):
            last = min(first + size, num)
            try:
                output = model(read(first, last))
            except (RuntimeError, AssertionError, TypeError) as error:  # its guards, or the first operation that the data do not fit
                hint = "name the experiment whose data the model takes; export it with batches of any size, and evaluation divides those"
                said = str(error).strip().partition("\n")[0]
                raise ConfigError(f"does not take these data: {said}", str(arguments.model), experiment.workload.data, hint) from error
            outputs.append(output.reshape(last - first, -1).float().numpy())
            if advance is not None:
                advance(last, num)
    return pd.DataFrame(np.concatenate(outputs), pd.Index(ids[:num]))


def write_vectors(path: Path, vectors: pd.DataFrame) -> None:
    """Write vectors to a Parquet file, atomically."""
    import pyarrow as pa
    from pyarrow import parquet

    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.to_numpy().reshape(-1)), vectors.shape[1])
    with writing(path), atomic_write(path) as partial:
        parquet.write_table(pa.table({"id": pa.array(vectors.index, pa.string()), "vector": lists}), partial)
    say(f"vectors: {path}, {len(vectors):,} of {vectors.shape[1]:,} numbers")


def read_vectors(path: Path) -> pd.DataFrame:
    """Read a file of vectors, a row each. Raises ``ConfigError`` for other columns, lengths that differ, or an id that comes twice."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import parquet

    hint = "Parquet with the columns id (text or whole numbers, each once) and vector (lists of float32 of one length)"
    with reading(path, hint, pa.ArrowException):
        table = parquet.read_table(path)
    held = str(table.schema.remove_metadata()).replace("\n", ", ")
    if {"id", "vector"} - set(table.schema.names) or getattr(table.schema.field("vector").type, "value_type", None) != pa.float32():
        raise ConfigError("has no such columns", str(path), held, hint)
    lengths, ids = pc.unique(pc.list_value_length(table["vector"])).to_pylist(), pd.Index(map(str, table["id"].to_pylist()))
    if len(lengths) != 1 or not lengths[0] or not ids.is_unique:
        what = "has vectors of several lengths, none, or a sample that comes twice"
        raise ConfigError(what, str(path), f"lengths {lengths[:4]}, {len(ids) - ids.nunique()} ids again", hint)
    return pd.DataFrame(pc.list_flatten(table["vector"]).to_numpy().reshape(len(table), lengths[0]), ids)


def compare(offline: pd.DataFrame, online: pd.DataFrame, source: Path) -> pd.DataFrame:
    """Return a table of the differences between both vectors, with one row per sample.

    ``largest`` and ``euclidean`` are norms of the difference as shares of the offline vector's norm; ``at`` is
    the index of the largest difference. A share is NaN if a number is not finite, and infinite if only the
    offline vector is zero. Raises ``ConfigError`` for different samples or lengths.
    """
    import numpy as np
    import pandas as pd

    lacks, unknown = offline.index.difference(online.index), online.index.difference(offline.index)
    if len(lacks) or len(unknown) or offline.shape[1] != online.shape[1]:
        what = f"{len(lacks)} of {len(offline)} samples have no vector, and {len(unknown)} were not evaluated"
        value = f"vectors of {online.shape[1]} numbers, and {offline.shape[1]} evaluated; samples {', '.join([*lacks[:3], *unknown[:3]])}"
        raise ConfigError(what, str(source), value, "ask the service for every sample, or evaluate only the first N by --samples N")
    own, other = (each.to_numpy(np.float64) for each in (offline, online.loc[offline.index]))
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = own - other
        norms = {"largest": np.inf, "euclidean": 2}
        sizes = {name: [np.linalg.norm(each, order, axis=1) for each in (apart, own)] for name, order in norms.items()}
        shares = {name: np.where(apart_size == 0, 0.0, apart_size / size) for name, (apart_size, size) in sizes.items()}
    return pd.DataFrame({**shares, "at": np.abs(apart).argmax(axis=1)}, index=offline.index.rename("id"))
