"""What is kept: calibrations, sealed predictions, and every leg as it comes, as JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


def now() -> str:
    """Date and time, UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of one grid below ``folder``; calibrations are shared by grids."""

    folder: Path
    prefix: str = ""

    @property
    def calibrations(self) -> Path:
        """One line a place."""
        return self.folder / "calibrations.jsonl"

    @property
    def predictions(self) -> Path:
        """All predictions of the grid, written once, before its real runs."""
        return self.folder / f"{self.prefix}predictions.json"

    @property
    def seal(self) -> Path:
        """The SHA-256 of the predictions."""
        return self.folder / f"{self.prefix}predictions.sha256"

    @property
    def raw(self) -> Path:
        """One line a leg, or what else happened."""
        return self.folder / f"{self.prefix}raw.jsonl"


def append(path: Path, entry: Entry) -> None:
    """Add a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read(path: Path) -> list[Entry]:
    """All lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def seal(files: Files, predictions: Entry) -> str:
    """Write the predictions and their hash, and note the moment in the raw file; the hash.

    Raises ``SystemExit`` where real runs have been measured against others.
    """
    if any(entry["kind"] == "leg" for entry in read(files.raw)):
        raise SystemExit(f"{files.raw} holds real runs: predictions after them would know the answer; move the files of this grid away")
    files.predictions.write_text(json.dumps(predictions, indent=1), encoding="utf-8")
    digest = digest_of(files.predictions)
    files.seal.write_text(digest + "\n", encoding="ascii")
    append(files.raw, {"kind": "predicted", "at": now(), "sha256": digest})
    return digest


def sealed(files: Files) -> tuple[str, Entry]:
    """The hash and the predictions. Raises ``SystemExit`` where there are none, or others than were sealed."""
    if not files.predictions.exists() or not files.seal.exists():
        raise SystemExit(f"{files.predictions} or its hash is missing: nothing is measured before it is predicted (--stage predict)")
    digest = digest_of(files.predictions)
    if digest != files.seal.read_text(encoding="ascii").strip():
        raise SystemExit(f"{files.predictions} is not what was sealed in {files.seal}")
    return digest, json.loads(files.predictions.read_text(encoding="utf-8"))
