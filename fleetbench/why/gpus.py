"""Connections between a host's GPUs, as nvidia-smi reports them. Source: ``nvidia-smi topo --help``."""

import collections
import itertools
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from fleetbench.config import Config

_NVIDIA_SMI_S = 20.0
"""Seconds to wait for nvidia-smi. Without persistence mode it starts the driver first."""
_CLOSEST = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Paths between a GPU and a network adapter, the shortest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus(Config):
    """Connections of a host's GPUs."""

    paths: dict[str, int]
    """Number of pairs of GPUs by the path between them, in nvidia-smi's words: ``{"NV18": 28}``."""
    adapters: dict[str, int]
    """Number of GPUs by the path to the closest network adapter: ``{"PIX": 8}``."""
    nvlink_bytes_per_s: float | None = None
    """Bytes per second in one direction over all NVLinks of a GPU, for the GPU with the least; None if unknown."""


def gpus_of_host() -> Gpus | None:
    """Return the connections of this host's GPUs according to nvidia-smi, which takes a second or more.

    Return None if nvidia-smi is missing or fails, or if it reports no GPU.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    texts = []
    for words in (("topo", "-m"), ("nvlink", "-s")):
        try:
            texts.append(subprocess.check_output([program, *words], text=True, timeout=_NVIDIA_SMI_S))
        except (OSError, subprocess.SubprocessError):
            return None
    return read_gpus(*texts)


def read_gpus(topology: str, nvlink: str = "") -> Gpus | None:
    """Parse the output of ``nvidia-smi topo -m`` and ``nvidia-smi nvlink -s``.

    Return None if ``topology`` names no GPU.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)  # the headings are underlined
    rows = [words for line in plain.splitlines() if (words := line.split())]
    heading: Sequence[str] = next((words for words in rows if words[0] == "GPU0" and words[1:2] != ["X"]), ())
    names = list(itertools.takewhile(lambda word: word != "CPU", heading))  # the next column is CPU Affinity
    own = [words for words in rows if words[0] in names and words is not heading]
    table = {words[0]: dict(zip(names, words[1:], strict=False)) for words in own}
    gpus = [name for name in table if name.startswith("GPU")]
    if not gpus:
        return None
    paths = collections.Counter(table[one].get(other, "?") for one, other in itertools.combinations(gpus, 2))
    adapters = collections.Counter[str]()
    for gpu in gpus:
        ways = [way for name, way in table[gpu].items() if not name.startswith("GPU") and way in _CLOSEST]
        adapters.update([min(ways, key=_CLOSEST.index)] if ways else [])
    return Gpus(paths=dict(paths), adapters=dict(adapters), nvlink_bytes_per_s=_nvlink(nvlink))


def _nvlink(text: str) -> float | None:
    """Return the least sum of one GPU's active links, ``Link 0: 26.562 GB/s`` below ``GPU 0: ...``."""
    parts = re.split(r"^GPU \d+:", text, flags=re.MULTILINE)[1:]
    sums = [sum(float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", part)) for part in parts]
    return min(sums) * 1e9 if sums and min(sums) > 0 else None
