"""Builds Horovod for the TensorFlow and the MPI of this environment, and installs it.

    python -m hvd_backend.build

fetches Horovod's source distribution (checked against its hash), makes the one change that it needs (two
for CUDA), compiles it with MPI alone (for CUDA: with NCCL too, which was **not run on a GPU**), installs the
wheel and checks that it imports. Wheels are kept in the user's cache and used again in every environment
with the same TensorFlow, Python, MPI and flags. Nothing here imports TensorFlow into this process.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from hvd_backend.build_mpi import check_mpi4py, find_mpi, loaded_mpi_code
from hvd_backend.build_plan import HOROVOD_VERSION, Plan, make_plan, usable_cores
from hvd_backend.build_progress import BuildProgress
from hvd_backend.build_source import define_gpu_stream, fetch_source, leave_out_xla, unpack
from hvd_backend.build_wheel import check_tools, compile_wheel
from tfdist.errors import EnvironmentProblem, TfdistError

__all__ = ["build_horovod", "main", "only_one"]

BUILD_MODULES = {  # module: the package that brings it
    "cloudpickle": "cloudpickle",
    "cmake": "cmake",
    "mpi4py": "mpi4py",
    "packaging": "packaging",
    "pip": "pip",
    "psutil": "psutil",
    "setuptools": "setuptools",
    "wheel": "wheel",
    "yaml": "pyyaml",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_backend.build",
        description=f"Build Horovod {HOROVOD_VERSION} for the TensorFlow and MPI found here, and install it.",
        epilog="Environment: TFDIST_MPI=wheel|system, TFDIST_DEVICE=cpu|cuda, HOROVOD_CUDA_HOME, "
        "HOROVOD_BUILD_CUDA_CC_LIST, CXX, CXXFLAGS, LDFLAGS, XDG_CACHE_HOME.",
    )
    parser.add_argument("--force", action="store_true", help="compile even if the cache holds the wheel")
    parser.add_argument("--print-key", action="store_true", help="print the wheel's key in the cache; do no more")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    console = Console()
    try:
        if options.print_key:
            print(make_plan(os.environ, find_mpi(os.environ)).key)
        else:
            build_horovod(os.environ, console, force=options.force)
    except TfdistError as error:
        print(f"Horovod: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Horovod: stopped; nothing was installed.", file=sys.stderr)
        return 130
    return 0


def _stop(signal_number: int, frame: FrameType | None) -> None:
    """On SIGTERM: unwind, so that compilers and temporary files go too."""
    sys.exit(128 + signal_number)


def build_horovod(environment: Mapping[str, str], console: Console, *, force: bool = False) -> None:
    """Build Horovod or take it from the cache, install it into this environment and check it."""
    _check_modules()
    mpi = find_mpi(environment)
    plan = make_plan(environment, mpi)
    check_mpi4py(mpi, environment)
    folder = _cache_folder(environment) / plan.key
    with only_one(folder, console):
        wheel = None if force else next(folder.glob("*.whl"), None)
        if wheel:
            _say(console, f"taking the wheel of an earlier build ({plan.key})")
        else:
            wheel = _build_into(folder, plan, environment, console)
        _say(console, "installing and checking")
        _install(wheel)
        try:
            _check_installed(plan, environment)
        except EnvironmentProblem:
            # Neither this environment nor the cache keeps a Horovod that does not work.
            _pip("uninstall", "--yes", "horovod")
            wheel.unlink()
            raise
    _say(console, f"version {HOROVOD_VERSION} is ready ({plan.tensorflow}, {mpi.kind} MPI {mpi.version})")


def _say(console: Console, text: str) -> None:
    console.print(f"Horovod: {text}", highlight=False, soft_wrap=True, markup=False)


def _check_modules() -> None:
    missing = [package for module, package in BUILD_MODULES.items() if not importlib.util.find_spec(module)]
    if missing:
        raise EnvironmentProblem(
            f"the build needs {', '.join(missing)}, not installed in {sys.prefix}; run `pip install 'tfdist[horovod]'`."
        )


def _cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of built wheels, made if need be."""
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base, "tfdist", "horovod")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise EnvironmentProblem(
            f"the cache {folder} cannot be written ({error.strerror}); set XDG_CACHE_HOME to another folder."
        ) from error
    return folder


@contextlib.contextmanager
def only_one(folder: Path, console: Console) -> Iterator[None]:
    """Hold the right to build and install this key; another build waits, and then finds the wheel."""
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(console, "another process builds the same wheel; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: two builds do the same work, each renames a file of its own
        yield


def _build_into(folder: Path, plan: Plan, environment: Mapping[str, str], console: Console) -> Path:
    """Compile the wheel and put it into `folder`, whole or not at all."""
    check_tools(environment)
    log = folder / "build.log"
    with tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as temporary:
        work = Path(temporary)
        _say(console, "preparing the source")
        source = unpack(fetch_source(folder.parent, environment), work)
        leave_out_xla(source)
        if plan.cuda:
            define_gpu_stream(source)
        _say(console, f"compiling on {usable_cores()} cores, a few minutes (log: {log})")
        with BuildProgress("Horovod: compiled", console) as progress:
            made = compile_wheel(plan, source, work, environment=environment, log=log, line=progress.line)
        # Copied under another name and then renamed: nobody ever sees half a wheel.
        partial = folder / f"{os.getpid()}.partial"
        shutil.copyfile(made, partial)
        os.replace(partial, folder / made.name)
        (folder / "identity.json").write_text(json.dumps(plan.identity, indent=2) + "\n")
        return folder / made.name


def _install(wheel: Path) -> None:
    done = _pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    if done.returncode != 0:
        raise EnvironmentProblem(f"pip cannot install {wheel} into {sys.prefix}:\n{done.stderr.strip()}")


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _check_installed(plan: Plan, environment: Mapping[str, str]) -> None:
    """Import Horovod in a process of its own, as a training process does: after mpi4py."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "import horovod.tensorflow as hvd\n"
        "print('built:', *(name for name in ('mpi', 'nccl', 'gloo') if getattr(hvd, name + '_built')()))\n"
    ) + loaded_mpi_code()
    settings = {**environment, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False)
    again = "it is removed again; repeating the command builds it anew."
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EnvironmentProblem(f"the Horovod that was built does not import ({reason}); {again}")
    lines = done.stdout.splitlines()
    expected = "built: mpi nccl" if plan.cuda else "built: mpi"
    if expected not in lines:
        raise EnvironmentProblem(f"the Horovod that was built says {lines[:1]}, not {expected!r}; {again}")
    libraries = [line for line in lines if line.startswith("libmpi: ")]
    if len(libraries) != 1:
        raise EnvironmentProblem(f"Horovod and mpi4py load different MPIs ({', '.join(libraries)}); {again}")


if __name__ == "__main__":
    sys.exit(main())
