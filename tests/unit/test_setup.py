"""`scripts/setup.sh`: what it refuses, and what it does to an environment without fetching anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what set-up reads, with no .venv."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def set_up(tree: Path, **settings: str) -> tuple[int, str]:
    environment = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    done = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=tree,
        env=environment | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def interpreter(folder: Path, name: str, answer: str) -> Path:
    """A program that answers set-up's question about a Python."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho {answer}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("TFDIST_MPI", "wheels", "wheel system"),
        ("TFDIST_DEVICE", "gpu", "cpu cuda"),
        ("TFDIST_HOROVOD", "1", "yes no"),
    ],
)
def test_unknown_settings_are_refused(tree: Path, name: str, value: str, allowed: str) -> None:
    assert set_up(tree, **{name: value}) == (
        1,
        f"tfdist: {name}={value} is unknown; use one of: {allowed}.\n",
    )
    assert not (tree / ".venv").exists()


def test_python_that_does_not_run(tree: Path) -> None:
    code, said = set_up(tree, PYTHON="/nonexistent/python")
    assert (code, len(said.splitlines())) == (1, 1)
    assert "PYTHON=/nonexistent/python does not run" in said


def test_python_that_is_too_old(tree: Path) -> None:
    python = interpreter(tree / "bin", "python", "3.9.18 unusable venv /usr/bin/python3.9")
    code, said = set_up(tree, PYTHON=str(python))
    assert (code, len(said.splitlines())) == (1, 1)
    assert f"PYTHON={python} is 3.9.18" in said


def test_python_without_venv(tree: Path) -> None:
    python = interpreter(tree / "bin", "python", "3.11.2 usable no-venv /usr/bin/python3.11")
    code, said = set_up(tree, PYTHON=str(python))
    assert (code, len(said.splitlines())) == (1, 1)
    assert "apt-get install python3.11-venv" in said


def test_no_python_on_path(tree: Path) -> None:
    tools = tree / "tools"
    tools.mkdir()
    for tool in ("bash", "cat", "cut", "dirname", "sed", "sha256sum"):
        found = shutil.which(tool)
        assert found
        (tools / tool).symlink_to(found)
    code, said = set_up(tree, PATH=str(tools))
    assert (code, len(said.splitlines())) == (1, 1)
    assert "none is on PATH" in said and "python3-venv" in said


def test_folder_named_venv_that_is_none_is_left_alone(tree: Path) -> None:
    (tree / ".venv").mkdir()
    (tree / ".venv" / "precious").write_text("")
    code, said = set_up(tree, PYTHON=sys.executable, TFDIST_DEVICE="cpu")
    assert code == 1 and "is not a virtual environment" in said
    assert (tree / ".venv" / "precious").exists()


def test_packages_that_cannot_be_fetched(tree: Path) -> None:
    unreachable = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    code, said = set_up(tree, PYTHON=sys.executable, TFDIST_DEVICE="cpu", **unreachable)
    assert code == 1
    assert "pip could not install the packages" in said.splitlines()[-1]
    assert not (tree / ".venv" / "tfdist-packages").exists()


def open_mpi_defaults(venv: Path) -> None:
    subprocess.run(["bash", str(ROOT / "scripts" / "openmpi_defaults.sh"), str(venv)], check=True)


def test_defaults_of_open_mpi_are_written_once(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "prte-mca-params.conf"
    file.parent.mkdir()
    file.write_text("# theirs\nrmaps_default_mapping_policy = :oversubscribe\n")  # as older set-ups left it
    open_mpi_defaults(tmp_path)
    open_mpi_defaults(tmp_path)
    assert file.read_text().splitlines() == [
        "# theirs",
        "rmaps_default_mapping_policy = slot:oversubscribe",
        "oob_tcp_keepalive_time = 3",
        "oob_tcp_keepalive_intvl = 2",
        "oob_tcp_keepalive_probes = 3",
    ]


def test_tools_for_tests_can_be_left_out() -> None:
    command = ["/bin/bash", str(ROOT / "scripts" / "test_tools.sh")]
    environment = {"PATH": "/nowhere", "TFDIST_TEST_TOOLS": "no"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_requirement_names_an_index_or_a_path() -> None:
    files = list((ROOT / "scripts" / "requirements").glob("*.txt"))
    assert {file.name for file in files} >= {"cpu.txt", "cuda.txt", "openmpi.txt"}
    for file in files:
        for line in file.read_text().splitlines():
            assert line.startswith(("#", "    --hash=sha256:")) or "==" in line, line
            assert "://" not in line and not line.startswith("--"), line
