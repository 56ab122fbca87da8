"""ImageNet's folder: ``train/``, ``val/`` and the lists ``train.txt`` and ``val.txt`` of ``path label`` lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleetbench.errors import ConfigError
from fleetbench.workloads.data.pictures import evaluation_pixels


@dataclass(frozen=True, slots=True)
class ImageList:
    """The pictures of a split, in the order of its list."""

    paths: list[str]
    """Below the data folder."""
    labels: list[int]
    lines: list[int]
    """Line of the list, from 1."""


def read_list(root: Path, split: str, classes: int) -> ImageList:
    """The list ``root/split.txt``; a path is below ``root`` or below ``root/split``, a label in 0..classes-1.

    Raises ``ConfigError`` naming file and line.
    """
    path = root / f"{split}.txt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        hint = "imagenet:DIR needs train/, val/, train.txt and val.txt in DIR"
        raise ConfigError(f"cannot be read: {error.strerror}", "workload.data", str(path), hint) from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8", "workload.data", str(path), "lines of `path label`") from None
    folders = _Folders(root)
    found = ImageList([], [], [])
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        name, label = _fields(line, where)
        if not 0 <= label < classes:
            hint = f"0..{classes - 1}, or more workload.model_options.classes"
            raise ConfigError("is not the label of a class", where, str(label), hint)
        inside = next((known for known in (name, f"{split}/{name}") if folders.hold(known)), None)
        if inside is None:
            raise ConfigError("no such file", where, repr(name), f"paths are relative to {root} or {root / split}")
        found.paths.append(inside)
        found.labels.append(label)
        found.lines.append(number)
    if not found.paths:
        raise ConfigError("lists no picture", "workload.data", str(path), "one `path label` line for every picture")
    return found


def _fields(line: str, where: str) -> tuple[str, int]:
    name, _, label = line.strip().replace("\t", " ").rpartition(" ")
    try:
        number = int(label)
    except ValueError:
        number = None
    if number is None or not name.strip():
        raise ConfigError("is no `path label` line", where, repr(line), "for example train/n01440764/n01440764_10026.JPEG 0")
    return name.strip(), number


class _Folders:
    """Which files are there, asked for once a folder: a million single questions take a network disk minutes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[str, frozenset[str]] = {}

    def hold(self, path: str) -> bool:
        """Whether there is a file ``path`` below the root."""
        folder, _, name = path.rpartition("/")
        if folder not in self._names:
            try:
                self._names[folder] = frozenset(entry.name for entry in (self._root / folder).iterdir())
            except OSError:
                self._names[folder] = frozenset()
        return name in self._names[folder]


def prepare_images(root: Path, classes: int, size: int, num_held_out: int, seed: int, folder: Path) -> None:
    """Write below ``folder`` the training list, and the pixels of at most ``num_held_out`` random pictures of ``val``.

    Raises ``ConfigError`` for a list or a validation picture that cannot be read.
    """
    train, val = (read_list(root, split, classes) for split in ("train", "val"))
    np.save(folder / "paths_train.npy", np.array([path.encode() for path in train.paths]))
    np.save(folder / "y_train.npy", np.array(train.labels, dtype=np.int64))
    chosen = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(val.paths))[:num_held_out]
    np.save(folder / "x_eval.npy", np.stack([evaluation_picture(root, val, index, size) for index in chosen]))
    np.save(folder / "y_eval.npy", np.array(val.labels, dtype=np.int64)[chosen])


def evaluation_picture(root: Path, val: ImageList, index: int, size: int) -> npt.NDArray[np.uint8]:
    """The middle of a listed picture, ``(3, size, size)``. Raises ``ConfigError`` naming its line where it cannot be decoded."""
    try:
        return evaluation_pixels(root / val.paths[index], size)
    except OSError as error:
        hint = "mend the file, or drop its line from the list"
        where = f"{root / 'val.txt'}:{val.lines[index]}"
        raise ConfigError(f"cannot be decoded: {error}", where, repr(val.paths[index]), hint) from None
