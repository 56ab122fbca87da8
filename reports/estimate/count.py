"""Count the operations of every run of ``data.csv``, nothing computed: ``python reports/estimate/count.py``.

Writes ``operations.json``.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import torch
from models import build

from real.estimate.operations import Recorder, nothing_computed

FOLDER = Path(__file__).parent
COUNTED = FOLDER / "operations.json"


def name_of(row: dict[str, str]) -> str:
    """What a run computes, whatever computes it."""
    return (
        " ".join(row[key] for key in ("model", "variant", "batch", "length"))
        + {"": "", "autocast": " half", "half": " all half", "bf16": " bf16"}[row["cast"]]
    )


def main() -> None:
    """Everything that is not in the file."""
    with (FOLDER / "data.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    counted = json.loads(COUNTED.read_text(encoding="utf-8")) if COUNTED.exists() else {}
    for row in rows:
        name = name_of(row)
        if name not in counted:
            counted[name] = count(row)
            COUNTED.write_text("{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in counted.items()) + "\n}\n")
            print(name, flush=True)


def count(row: dict[str, str]) -> dict[str, object]:
    """Of one micro-batch: operations by kind, type, FLOPs and bytes, and how often each; and the parameters."""
    recorder = Recorder(lambda _: 0.0)
    with nothing_computed():
        torch.set_default_dtype(torch.float16 if row["cast"] == "half" else torch.float32)
        model, batch = build(row)
        with recorder:
            narrow = torch.bfloat16 if row["cast"] == "bf16" else torch.float16
            with torch.autocast("cpu", dtype=narrow, enabled=row["cast"] in ("autocast", "bf16")):
                loss = model(batch)
            loss.backward()
    found = Counter((each.kind, str(each.dtype).removeprefix("torch."), each.flops, each.nbytes) for each in recorder.operations)
    return {"parameters": sum(item.numel() for item in model.parameters()), "operations": [[*key, number] for key, number in found.items()]}


if __name__ == "__main__":
    main()
