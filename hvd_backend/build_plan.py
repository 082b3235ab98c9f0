"""What to build: the flags of a Horovod build, and the key under which its wheel is kept.

Called by `build.py`. It reads which packages are installed and the environment that it is handed; it
imports no TensorFlow and changes nothing. An NCCL build compiles, links, imports and reduces CPU tensors
(checked without a GPU); it was **not run on a GPU**.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from hvd_backend.build_mpi import Mpi
from tfdist.errors import EnvironmentProblem, UsageError, closest

__all__ = ["HOROVOD_VERSION", "Cuda", "Plan", "build_environment", "find_cuda", "make_plan", "usable_cores"]

HOROVOD_VERSION = "0.28.1"
RECIPE = 1  # goes up when the same settings give another wheel
TENSORFLOW_PACKAGES = ("tensorflow-cpu", "tensorflow")
NCCL_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
DEVICES = ("cpu", "cuda")

# MPI alone. Gloo would bring Horovod's own rendezvous server, which executes what anybody sends to it.
MPI_ONLY = {
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_CPU_OPERATIONS": "MPI",
}

# What of the user's environment changes the compiled code.
COMPILER_VARIABLES = ("CXX", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "HOROVOD_BUILD_ARCH_FLAGS")


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """What an NCCL build needs."""

    cuda_home: Path
    """The folder that holds `bin/nvcc`."""
    nccl: Path
    """The folder of the NCCL wheel: `include/nccl.h` and `lib/libnccl.so.2`."""
    nccl_version: str
    architectures: str
    """Compute capabilities without their point, as in `80,90`; empty for all that nvcc knows."""

    def variables(self, nccl_home: Path) -> dict[str, str]:
        """The variables of Horovod's build; `nccl_home` is where `libnccl.so` can be linked."""
        chosen = {
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(self.cuda_home),
            "HOROVOD_NCCL_HOME": str(nccl_home),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
        if self.architectures:
            chosen["HOROVOD_BUILD_CUDA_CC_LIST"] = self.architectures
        return chosen


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One build of Horovod, decided."""

    tensorflow: str
    """Package and version, as in `tensorflow-cpu 2.21.0`."""
    python: str
    """The tag of this interpreter's binary interface."""
    platform: str
    mpi: Mpi
    cuda: Cuda | None
    compiler: Mapping[str, str] = field(default_factory=dict)
    """The user's compiler variables."""

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return "cuda" if self.cuda else "cpu"

    @property
    def rpaths(self) -> list[str]:
        """Where Horovod's library looks for libmpi and libnccl."""
        nccl = "$ORIGIN/../../nvidia/nccl/lib" if self.cuda else None
        return [path for path in (self.mpi.rpath, nccl) if path]

    @property
    def identity(self) -> dict[str, object]:
        """All that makes one wheel differ from another.

        The wheel MPI counts by its version alone, so that other clones use the same Horovod wheel; a
        system's MPI also by its folder.
        """
        cuda = asdict(self.cuda) | {"nccl": ""} if self.cuda else {}
        return {
            "recipe": RECIPE,
            "horovod": HOROVOD_VERSION,
            "tensorflow": self.tensorflow,
            "python": self.python,
            "platform": self.platform,
            "mpi": f"{self.mpi.kind} {self.mpi.version}",
            "rpaths": self.rpaths,
            "flags": MPI_ONLY,
            "cuda": {name: str(value) for name, value in cuda.items()},
            "compiler": dict(self.compiler),
        }

    @property
    def key(self) -> str:
        """The name of the wheel's folder in the cache: readable parts, then a digest of the identity."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]
        version = self.tensorflow.split()[-1]
        return f"tf{version}-{self.python.split('-')[0]}-{self.mpi.kind}-{self.device}-{digest}"


def make_plan(environment: Mapping[str, str], mpi: Mpi) -> Plan:
    """The build for the packages of this environment and the settings in `environment`."""
    tensorflow = _first_installed(TENSORFLOW_PACKAGES)
    if tensorflow is None:
        raise EnvironmentProblem(
            f"TensorFlow is not installed in {sys.prefix}, and Horovod is built for one version of it; "
            "run `pip install 'tfdist[cpu]'` or `pip install 'tfdist[cuda]'` first."
        )
    device = environment.get("TFDIST_DEVICE") or (
        "cuda" if tensorflow[0] == "tensorflow" and _first_installed(NCCL_PACKAGES) else "cpu"
    )
    if device not in DEVICES:
        raise UsageError(f"TFDIST_DEVICE={device} is unknown; use cpu or cuda.{closest(device, DEVICES)}")
    return Plan(
        tensorflow=" ".join(tensorflow),
        python=str(sysconfig.get_config_var("SOABI")).replace("cpython-", "cp"),
        platform=" ".join((sysconfig.get_platform(), *platform.libc_ver())),
        mpi=mpi,
        cuda=find_cuda(environment) if device == "cuda" else None,
        compiler={name: environment[name] for name in COMPILER_VARIABLES if environment.get(name)},
    )


def _first_installed(packages: tuple[str, ...]) -> tuple[str, str] | None:
    for package in packages:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def find_cuda(environment: Mapping[str, str]) -> Cuda:
    """The CUDA compiler, the NCCL wheel and the architectures to build for."""
    nccl = _first_installed(NCCL_PACKAGES)
    if nccl is None:
        raise EnvironmentProblem(
            f"an NCCL build needs the NCCL wheel, which {sys.prefix} has not; "
            "run `pip install 'tensorflow[and-cuda]'`, or set TFDIST_DEVICE=cpu."
        )
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    named = environment.get("HOROVOD_CUDA_HOME") or environment.get("CUDA_HOME")
    home = Path(named or (Path(nvcc).resolve().parent.parent if nvcc else "/usr/local/cuda"))
    if not (home / "bin" / "nvcc").exists():
        raise EnvironmentProblem(
            f"no CUDA compiler: {home}/bin/nvcc does not exist; install the CUDA toolkit and set "
            "HOROVOD_CUDA_HOME to its folder, or set TFDIST_DEVICE=cpu."
        )
    return Cuda(
        cuda_home=home,
        nccl=Path(str(metadata.distribution(nccl[0]).locate_file("nvidia"))) / "nccl",
        nccl_version=nccl[1],
        architectures=environment.get("HOROVOD_BUILD_CUDA_CC_LIST") or _architectures_here(environment),
    )


def _architectures_here(environment: Mapping[str, str]) -> str:
    """The compute capabilities of this machine's GPUs, as in `80,90`; empty where there is none."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None:
        return ""
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    found = {line.strip().replace(".", "") for line in done.stdout.splitlines()} if not done.returncode else set()
    return ",".join(sorted(capability for capability in found if capability.isdigit()))


def usable_cores() -> int:
    """How many processors this process may use; more than 16 would only cost memory, for 27 files."""
    return min(len(os.sched_getaffinity(0)), 16)


def build_environment(
    plan: Plan, environment: Mapping[str, str], *, toolchain: Path, nccl_home: Path, cores: int
) -> dict[str, str]:
    """The environment of the build: the caller's, less what would change the build unseen."""
    dropped = ("HOROVOD_", "MAKE", "MFLAGS", "I_MPI_ROOT")
    built = {name: value for name, value in environment.items() if not name.startswith(dropped)}
    # CMake looks in these before PATH. A cluster's module may have set them to another MPI.
    built |= {"MPI_HOME": str(plan.mpi.prefix), "MPI_ROOT": str(plan.mpi.prefix)}
    folders = [str(plan.mpi.prefix / "bin"), os.path.join(sys.prefix, "bin"), environment.get("PATH", "")]
    built["PATH"] = os.pathsep.join(folder for folder in folders if folder)
    built |= MPI_ONLY
    built |= plan.compiler
    if plan.cuda:
        built |= plan.cuda.variables(nccl_home)
    else:
        built["HOROVOD_WITHOUT_NVTX"] = "1"  # else it is linked wherever a CUDA toolkit happens to lie
    built |= {
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        # Whatever a surrounding make says, and not Horovod's own -j8.
        "MAKEFLAGS": f"-j{cores}",
        # Horovod's CMake asks TensorFlow for its flags, and needs no GPU for that.
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return built
