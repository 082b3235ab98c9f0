"""Compiles Horovod's source into a wheel, by pip, setuptools and CMake. Called by `build.py`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hvd_backend.build_plan import Plan, build_environment, usable_cores
from tfdist.errors import EnvironmentProblem

__all__ = ["check_tools", "compile_wheel", "error_lines", "lay_out_nccl", "toolchain_file"]

_TELLING = re.compile(r"(fatal )?error:|undefined reference|CMake Error|\*\*\* |No space left|Killed", re.IGNORECASE)
_NOISE = re.compile(r"ERROR: Failed|subprocess")


def check_tools(environment: Mapping[str, str]) -> None:
    """Raise unless there are a C++ compiler and make."""
    path = environment.get("PATH", "")
    named = shlex.split(environment.get("CXX", ""))[:1]
    compilers = named or ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler, path=path) for compiler in compilers):
        found = f"CXX={named[0]} is not a program" if named else "no C++ compiler on PATH"
        raise EnvironmentProblem(
            f"{found}, and Horovod has to be compiled; "
            "install one (Debian, Ubuntu: apt-get install g++ make), or name it in CXX."
        )
    if not any(shutil.which(make, path=path) for make in ("gmake", "make")):
        raise EnvironmentProblem(
            "make is not on PATH, and Horovod has to be compiled; install it (Debian, Ubuntu: apt-get install make)."
        )


def compile_wheel(
    plan: Plan,
    source: Path,
    work: Path,
    *,
    environment: Mapping[str, str],
    log: Path,
    line: Callable[[str], None],
) -> Path:
    """Build the wheel in `work`; its output goes to `log` and, line by line, to `line`."""
    toolchain = work / "toolchain.cmake"
    toolchain.write_text(toolchain_file(plan))
    nccl_home = work / "nccl"
    if plan.cuda:
        lay_out_nccl(plan.cuda.nccl, nccl_home)
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-index", "--no-cache-dir"]
    command += ["--use-pep517", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    built = build_environment(plan, environment, toolchain=toolchain, nccl_home=nccl_home, cores=usable_cores())
    code = _run_logged(command, built, log, line)
    made = list(wheels.glob("*.whl"))
    if code != 0 or len(made) != 1:
        telling = "\n".join(f"    {text}" for text in error_lines(log.read_text(errors="replace")))
        raise EnvironmentProblem(
            f"the source does not compile here; the whole log is {log}, and its last errors are\n{telling}"
        )
    return made[0]


def toolchain_file(plan: Plan) -> str:
    """A CMake file that fixes where the library looks for libmpi and libnccl.

    By itself CMake writes the folders that it linked from into the library: this environment's, and a
    temporary one. The wheel must work in other environments and after these are gone.
    """
    return f'set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\nset(CMAKE_INSTALL_RPATH "{";".join(plan.rpaths)}")\n'


def lay_out_nccl(wheel: Path, home: Path) -> None:
    """Lay out the NCCL wheel for a linker: it has `libnccl.so.2` alone, and -lnccl asks for `libnccl.so`."""
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "libnccl.so").symlink_to(wheel / "lib" / "libnccl.so.2")
    (home / "include").symlink_to(wheel / "include")


def _run_logged(command: list[str], environment: Mapping[str, str], log: Path, line: Callable[[str], None]) -> int:
    """Run `command` in a process group of its own, which ends with this process's interest in it."""
    with (
        log.open("w") as record,
        subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for text in process.stdout:
                record.write(text)
                line(text)
            return process.wait()
        except BaseException:
            # Compilers would go on after Ctrl-C, since they do not belong to this terminal's group.
            os.killpg(process.pid, signal.SIGTERM)
            raise


def error_lines(log: str, count: int = 12) -> list[str]:
    """The last lines of a build log that name an error, or the very last lines if none does."""
    lines = [text.strip() for text in log.splitlines() if text.strip()]
    # pip and setuptools add lines of their own, which tell nothing, and commands that fill a screen.
    telling = [text for text in lines if _TELLING.search(text) and not _NOISE.search(text) and len(text) < 400]
    return (telling or lines)[-count:]
