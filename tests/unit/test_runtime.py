"""What is set before TensorFlow starts. Affinity and terminals are real ones, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import ROOT
from tfdist.cluster import runtime
from tfdist.cluster.identity import Identity
from tfdist.errors import EnvironmentProblem

ALONE = Identity("alone")
CORES = sorted(os.sched_getaffinity(0))

two_cores = pytest.mark.skipif(len(CORES) < 2, reason="narrowing and widening needs two cores")

# Stands in for mpirun on this host: carries its name, and starts one rank on core CORE that has a terminal of its own.
LAUNCHER = """
import os, pty, subprocess, sys
open("/proc/self/comm", "w").write("mpirun")
core, program = int(sys.argv[1]), sys.argv[2]
_, terminal = pty.openpty()
rank = subprocess.run(
    [sys.executable, "-c", program],
    stdout=terminal,
    stderr=subprocess.PIPE,
    preexec_fn=lambda: os.sched_setaffinity(0, {core}),
)
sys.stderr.buffer.write(rank.stderr)
sys.exit(rank.returncode)
"""

IMPORTS = """
import json, os, sys
from tfdist.cluster import runtime
from tfdist.cluster.identity import Identity
def answer(value): print(json.dumps(value), file=sys.stderr)
"""


def ask(command: list[str], **keywords: Any) -> Any:
    """What the program hands to `answer`."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **keywords.pop("env", {})}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, env=environ, **keywords)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr)


def ask_python(program: str, **keywords: Any) -> Any:
    return ask([sys.executable, "-c", IMPORTS + program], **keywords)


def ask_rank(program: str, **keywords: Any) -> Any:
    return ask([sys.executable, "-c", LAUNCHER, str(CORES[0]), IMPORTS + program], **keywords)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(runtime, "_quota", lambda: 1_000_000)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("processes", "replicas", "threads"), [(1, 1, 8), (1, 2, 4), (2, 1, 4), (3, 1, 2), (8, 1, 1), (16, 1, 1), (2, 3, 1)]
)
def test_cores_are_shared_by_the_replicas_of_the_host(processes: int, replicas: int, threads: int) -> None:
    # Ranks under mpirun and replicas of one process alike.
    for launcher in ("mpi", "tf_config"):
        identity = Identity(launcher, size=processes, local_size=processes)
        assert runtime.intra_op_threads(identity, replicas) == threads


@pytest.mark.usefixtures("eight_cores")
def test_other_hosts_do_not_count() -> None:
    assert runtime.intra_op_threads(Identity("mpi", size=64, local_size=2), 1) == 4


@pytest.mark.usefixtures("eight_cores")
def test_what_the_user_chose_counts() -> None:
    assert runtime.intra_op_threads(Identity("mpi", size=4, local_size=4), 1, chosen=5) == 5


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("150000 100000", 2), ("200000 100000", 2), ("1000 100000", 1)]
)
def test_a_container_may_have_a_quota(text: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    read = Path.read_text
    quota = Path("/sys/fs/cgroup/cpu.max")
    monkeypatch.setattr(Path, "read_text", lambda path, *args: text if path == quota else read(path, *args))
    assert runtime.usable_cores(ALONE) == cores


def test_a_process_on_one_core_has_one_thread() -> None:
    program = f"os.sched_setaffinity(0, {{{CORES[-1]}}}); answer(runtime.intra_op_threads(Identity('alone'), 1))"
    assert ask_python(program) == 1


def test_alone_the_affinity_stays() -> None:
    program = (
        f"os.sched_setaffinity(0, {{{CORES[-1]}}}); runtime.prepare(Identity('alone'), {{}}); "
        "answer(list(os.sched_getaffinity(0)))"
    )
    assert ask_python(program) == [CORES[-1]]


@two_cores
@pytest.mark.parametrize("local_size", [1, 2, len(CORES), len(CORES) + 1])
def test_a_binding_that_leaves_cores_unused_is_widened(local_size: int) -> None:
    program = (
        f"identity = Identity('mpi', size={local_size}, local_size={local_size})\n"
        "threads = runtime.intra_op_threads(identity, 1)\n"
        "runtime.prepare(identity, {})\n"
        "answer([sorted(os.sched_getaffinity(0)), threads, runtime.intra_op_threads(identity, 1)])"
    )
    affinity, before, after = ask_rank(program)
    # One core is enough where there is one rank or more for each.
    assert affinity == (CORES if len(CORES) // local_size > 1 else CORES[:1])
    assert before == after == max(1, runtime.usable_cores(ALONE) // local_size)


@two_cores
@pytest.mark.parametrize("own", CORES[:2])
def test_a_binding_is_never_widened_beyond_the_launcher(own: int) -> None:
    """The launcher is on the second core, as in a SLURM step; the rank is there too, or on the first one."""
    program = "runtime.prepare(Identity('mpi'), {}); answer(sorted(os.sched_getaffinity(0)))"
    narrow = f"import os; os.sched_setaffinity(0, {{{CORES[1]}}})\n"
    command = [sys.executable, "-c", narrow + LAUNCHER, str(own), IMPORTS + program]
    assert ask(command) == sorted({own, CORES[1]})


@two_cores
def test_a_binding_can_be_kept() -> None:
    program = "runtime.prepare(Identity('mpi'), {'TFDIST_KEEP_BINDING': '1'}); answer(sorted(os.sched_getaffinity(0)))"
    assert ask_rank(program) == CORES[:1]


def test_defaults_are_set() -> None:
    environ: dict[str, str] = {}
    runtime.prepare(ALONE, environ)
    assert environ == {
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "HOROVOD_CYCLE_TIME": "0.5",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
    }


def test_defaults_give_way_to_the_environment_of_the_user() -> None:
    own = {
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "HOROVOD_CYCLE_TIME": "7",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "KERAS_BACKEND": "tensorflow",
        "TFDIST_KEEP_BINDING": "1",
    }
    environ = dict(own)
    runtime.prepare(ALONE, environ)
    assert environ == own


def test_another_backend_of_keras_is_refused() -> None:
    environ = {"KERAS_BACKEND": "jax"}
    with pytest.raises(EnvironmentProblem, match=r"KERAS_BACKEND='jax', .* Unset KERAS_BACKEND"):
        runtime.prepare(ALONE, environ)
    assert environ == {"KERAS_BACKEND": "jax"}


WIDTH = "answer(runtime.terminal_width(Identity({launcher!r})))"


@pytest.mark.parametrize("launcher", ["alone", "tf_config"])
def test_without_a_terminal_there_is_no_width(launcher: str, tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as output:
        assert ask_python(WIDTH.format(launcher=launcher), stdout=output) is None


@pytest.mark.parametrize("launcher", ["alone", "tf_config"])
def test_the_width_of_a_terminal(launcher: str) -> None:
    with Terminal(91) as terminal:
        assert ask_python(WIDTH.format(launcher=launcher), stdout=terminal) == 91


def test_under_mpirun_the_terminal_of_mpirun_counts(tmp_path: Path) -> None:
    program = WIDTH.format(launcher="mpi")
    with Terminal(77) as terminal:
        assert ask_rank(program, stdout=terminal) == 77
    with (tmp_path / "output").open("w") as output:
        assert ask_rank(program, stdout=output) is None


class Terminal:
    """A terminal of so many columns."""

    def __init__(self, columns: int) -> None:
        import pty
        import termios

        self._master, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (24, columns))

    def __enter__(self) -> int:
        return self._slave

    def __exit__(self, *_: object) -> None:
        os.close(self._master)
        os.close(self._slave)


@pytest.mark.parametrize("level", [None, "0"])
def test_tensorflow_is_imported_without_its_notes_unless_the_user_set_a_level(level: str | None) -> None:
    """A stand-in for TensorFlow that prints a note while it is imported."""
    program = (
        "import types, importlib.abc, importlib.machinery\n"
        "class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):\n"
        "    def find_spec(self, name, *_):\n"
        "        return importlib.machinery.ModuleSpec(name, self) if name == 'tensorflow' else None\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module):\n"
        "        os.write(2, b'a note\\n')\n"
        "        if 'FAIL' in os.environ: raise ImportError('broken')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "runtime.prepare(Identity('alone'))\n"
        "runtime.import_tensorflow()\n"
        "assert 'tensorflow' in sys.modules\n"
        "os.write(2, b'later\\n')\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environ |= {"PYTHONPATH": str(ROOT)} | ({} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level})
    command = [sys.executable, "-c", IMPORTS + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert done.stderr == ("later\n" if level is None else "a note\nlater\n")
    failed = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ | {"FAIL": "1"})
    assert failed.returncode == 1
    assert failed.stderr.count("a note\n") == 1
    assert "ImportError: broken" in failed.stderr
