"""What this process may use, and defaults that make a plain `mpirun -np N python …` fast.

Runs before MPI and TensorFlow start. Every default gives way to the user's own environment.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import MutableMapping
from pathlib import Path

from tfdist.cluster.identity import Identity
from tfdist.errors import EnvironmentProblem

__all__ = ["import_tensorflow", "intra_op_threads", "prepare", "terminal_width", "usable_cores"]

_DEFAULTS = {
    # A waiting rank gives its core to the others: four ranks on two cores would fight for them otherwise.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Horovod collects tensors for this many milliseconds before it reduces them. We hand over one buffer a step.
    "HOROVOD_CYCLE_TIME": "0.5",
    # TensorFlow's start-up notes would come once per rank. 2 leaves errors.
    "TF_CPP_MIN_LOG_LEVEL": "2",
}

_quiet = False

_LAUNCHERS = frozenset({"prted", "prterun", "mpirun", "mpiexec", "orterun", "orted", "hydra_pmi_proxy", "slurmstepd"})


def prepare(identity: Identity, environ: MutableMapping[str, str] | None = None) -> None:
    """Set the defaults above and widen a binding that leaves cores unused. Call before TensorFlow is imported.

    Raises:
        EnvironmentProblem: Keras is set to another backend than TensorFlow.
    """
    global _quiet
    environ = os.environ if environ is None else environ
    _quiet = _quiet or "TF_CPP_MIN_LOG_LEVEL" not in environ
    keras = environ.get("KERAS_BACKEND") or "tensorflow"
    if keras != "tensorflow":
        raise EnvironmentProblem(f"KERAS_BACKEND={keras!r}, but tfdist trains TensorFlow models. Unset KERAS_BACKEND.")
    environ["KERAS_BACKEND"] = keras
    for name, value in _DEFAULTS.items():
        environ.setdefault(name, value)
    if "TFDIST_KEEP_BINDING" not in environ:
        _widen_binding(identity)


def import_tensorflow() -> None:
    """Import TensorFlow without its start-up notes, which no log level leaves out and every rank would repeat.

    The notes are shown if the import fails, and where the user has set a log level.
    """
    if "tensorflow" in sys.modules or not _quiet:
        import tensorflow

        return
    if sys.stderr is not None:
        sys.stderr.flush()
    with tempfile.TemporaryFile() as notes:
        stderr = os.dup(2)
        os.dup2(notes.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except BaseException:
            notes.seek(0)
            os.write(stderr, notes.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def usable_cores(identity: Identity) -> int:
    """Processors that the processes of this job on this host may use together.

    Under mpirun it is what the launcher itself may use (it binds the ranks, not itself), else what this process
    may use; a container's CPU quota limits both.
    """
    return max(1, min(len(_job_cores(identity)), _quota()))


def intra_op_threads(identity: Identity, local_replicas: int, chosen: int | None = None) -> int:
    """Threads of one TensorFlow operation: `chosen`, else max(1, usable cores // replicas on this host).

    One rule for all backends, since another number of threads adds in another order and so changes last bits.
    """
    if chosen is not None:
        return chosen
    return max(1, usable_cores(identity) // (identity.local_size * local_replicas))


def seconds_since_start(moment: float | None) -> float | None:
    """From the start of this process to a moment of the system's clock; None where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        running = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return None if moment is None else moment - (time.time() - running)


def terminal_width(identity: Identity) -> int | None:
    """Columns of the terminal that shows what this process prints; None where no terminal does.

    mpirun gives every rank a terminal of its own and forwards what is printed there, so its own output counts.
    """
    if sys.stdout is None or not sys.stdout.isatty():  # None: the user has closed it
        return None
    if identity.launcher != "mpi":
        return os.get_terminal_size(sys.stdout.fileno()).columns
    try:
        descriptor = os.open(f"/proc/{_launcher()}/fd/1", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return None
    try:
        return os.get_terminal_size(descriptor).columns
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _widen_binding(identity: Identity) -> None:
    """Mpirun binds small jobs to one core each; widen where that leaves cores of the job unused."""
    job = _job_cores(identity)
    own = os.sched_getaffinity(0)
    if len(own) < len(job) // identity.local_size:
        # To no more than what the launcher itself may use, and so never beyond a cpuset or a SLURM step.
        os.sched_setaffinity(0, job)


def _job_cores(identity: Identity) -> set[int]:
    own = os.sched_getaffinity(0)
    launcher = _launcher() if identity.launcher == "mpi" else None
    return own if launcher is None else own | os.sched_getaffinity(launcher)


def _launcher() -> int | None:
    """Process id of the MPI launcher on this host; a shell or a wrapper may stand between it and this process."""
    pid = os.getppid()
    for _ in range(8):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() in _LAUNCHERS:
                return pid
            # "pid (name) state ppid …": the name may hold spaces and brackets
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
    return None


def _quota() -> int:
    """Whole processors that a container's CPU quota allows (cgroup v2); a large number without one."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, math.ceil(int(limit) / int(period)))
    except (OSError, ValueError):
        return 1_000_000
