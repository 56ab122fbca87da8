from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fleetbench
from fleetbench.strategy import DistributedStrategy

ROOT = Path(__file__).parents[2]
PACKAGES = ("fleetbench", "sim", "real", "tuner")


def test_the_public_names_are_exactly_those_documented() -> None:
    """What users import is listed once, and each name has a home."""
    simulations = ["over_seeds", "simulate", "sweep", "tune", "tune_simulated", "tune_sizes", "what_if"]
    documented = ["DistributedStrategy", "Experiment", "compare_runs", "ensure_profile", "estimate", "fit_stragglers", "fleet"]
    documented += ["learn", "load_run", "load_runs", "measure", *simulations]
    assert fleetbench.__all__ == documented
    assert set(fleetbench._HOMES) == set(fleetbench.__all__)
    public = {name for name in vars(fleetbench) if not name.startswith("_")}
    modules = {path.stem for path in (ROOT / "fleetbench").iterdir()}
    assert public - modules <= {*fleetbench.__all__, "TYPE_CHECKING", "Any", "annotations", "importlib"}


@pytest.mark.parametrize("name", fleetbench.__all__)
def test_a_public_name_is_what_its_home_holds(name: str) -> None:
    """Every name loads on first use."""
    module, attribute = fleetbench._HOMES[name]
    assert getattr(fleetbench, name) is getattr(importlib.import_module(module), attribute)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """``hasattr`` and ``from fleetbench import x`` behave as for any module."""
    assert not hasattr(fleetbench, "no_such_name")
    assert fleetbench.DistributedStrategy is DistributedStrategy


@pytest.mark.slow
def test_sdist_and_wheel_hold_the_four_packages_and_nothing_else(tmp_path: Path) -> None:
    """Every source and data file of the packages, and no test, notebook or report; the wheel is built from the sdist."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        shipped = {member.name.partition("/")[2] for member in archive if member.isfile()}
    others = {"README.md", "LICENSE", "constraints.txt", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert shipped == names | others
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    tracked = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    assert names == {name for name in tracked if "__pycache__" not in name}
    assert {"fleetbench/quickstart.toml", "fleetbench/hardware/catalogue.toml"} <= names


@pytest.mark.slow
def test_the_wheel_works_where_the_source_is_not(tmp_path: Path) -> None:
    """In a fresh environment with the libraries of this one, without its fleetbench: help, the built-in experiment, a public name."""
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    libraries, environment, here = tmp_path / "libraries", tmp_path / "environment", tmp_path / "here"
    here.mkdir()
    libraries.mkdir()
    for folder in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for path in folder.iterdir():  # links, as a .pth file among them would bring the source back
            if path.suffix != ".pth" and not path.name.startswith(("fleetbench", "__editable__")) and not (libraries / path.name).exists():
                (libraries / path.name).symlink_to(path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [environment / "bin" / words[0], *words[1:]], cwd=here, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("python", "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel))
    assert run("python", "-c", "import fleetbench; print(fleetbench.__file__)").startswith(str(environment))
    assert run("fleetbench", "--help").startswith("usage: fleetbench")
    table = run("fleetbench", "sim", "--set", "workload.steps=20")
    assert "step" in table
    assert len(list((here / "runs").glob("quickstart-sim-*/manifest.json"))) == 1
    assert "distributed_model" in run("python", "-c", "from fleetbench import fleet; print(dir(fleet))")
