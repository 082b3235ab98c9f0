"""Horovod's source: fetched with pip, checked, unpacked, and changed for current TensorFlow.

Called by `build.py`. A build for CPUs needs one change (`leave_out_xla`), an NCCL build one more
(`define_gpu_stream`).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvd_backend.build_plan import HOROVOD_VERSION
from tfdist.errors import EnvironmentProblem

__all__ = ["SOURCE_SHA256", "define_gpu_stream", "fetch_source", "leave_out_xla", "unpack"]

SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_NAME = f"horovod-{HOROVOD_VERSION}"


def fetch_source(folder: Path, environment: Mapping[str, str]) -> Path:
    """The source distribution in `folder`, fetched with pip unless it is there already."""
    archive = folder / f"{_NAME}.tar.gz"
    if archive.exists() and _sha256(archive) == SOURCE_SHA256:
        return archive
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as temporary:
        requirement = Path(temporary, "requirement.txt")
        requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SOURCE_SHA256}\n")
        # No build isolation: pip asks the source for its name, and would fetch setuptools for that.
        command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps"]
        command += ["--no-binary", "horovod", "--no-build-isolation", "--retries", "2"]
        command += ["--dest", temporary, "--requirement", str(requirement)]
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
        fetched = Path(temporary, archive.name)
        if done.returncode != 0 or not fetched.exists():
            raise EnvironmentProblem(_why_not_fetched(done.stdout + done.stderr, archive))
        os.replace(fetched, archive)
    return archive


def _why_not_fetched(output: str, archive: Path) -> str:
    if "DO NOT MATCH THE HASHES" in output:
        return (
            f"the {archive.name} that pip found is not the released one, whose SHA-256 is {SOURCE_SHA256}; "
            f"check pip's index and its find-links, or put the released file at {archive}."
        )
    errors = [line for line in output.splitlines() if line.upper().startswith("ERROR")]
    reason = errors[-1].partition(":")[2].strip() if errors else "pip gave no reason"
    return (
        f"Horovod's source cannot be fetched (pip: {reason}); "
        f"check the network and pip's index or proxy, or put {archive.name} at {archive}."
    )


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def unpack(archive: Path, into: Path) -> Path:
    """Unpack the source distribution; returns the folder of the source."""
    with tarfile.open(archive) as source:
        for member in source:
            parts = Path(member.name).parts
            if not (member.isfile() or member.isdir()) or ".." in parts or parts[:1] != (_NAME,):
                raise EnvironmentProblem(
                    f"{archive} holds {member.name!r}, which a source distribution must not; delete the file."
                )
        if hasattr(tarfile, "data_filter"):  # Debian 12's Python 3.11 is older than this filter
            source.extraction_filter = tarfile.data_filter
        source.extractall(into)
    return into / _NAME


def leave_out_xla(source: Path) -> None:
    """Take `xla_mpi_ops.cc` out of the sources of Horovod's TensorFlow library.

    It needs XLA headers that TensorFlow's package no longer ships. Without a GPU it is empty anyway; with
    one it is for XLA-compiled collectives, which Horovod leaves off by default.
    """
    file = source / "horovod" / "tensorflow" / "CMakeLists.txt"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "xla_mpi_ops.cc" not in line]
    if len(lines) - len(kept) != 1:
        raise EnvironmentProblem(
            f"{file.relative_to(source)} names xla_mpi_ops.cc on {len(lines) - len(kept)} lines "
            f"instead of one, so this is not Horovod {HOROVOD_VERSION}; delete the cached source and repeat."
        )
    file.write_text("".join(kept))


_STREAM_DECLARATION = "GpuStreamHandle AsGpuStreamValue(Stream* stream);"
_STREAM_DEFINITION = """
#if HAVE_GPU
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
#endif // HAVE_GPU
"""


def define_gpu_stream(source: Path) -> None:
    """Define `AsGpuStreamValue`, which Horovod declares and TensorFlow no longer exports.

    Without it an NCCL build compiles and links, but its library does not load.
    """
    file = source / "horovod" / "tensorflow" / "mpi_ops.cc"
    text = file.read_text()
    if text.count(_STREAM_DECLARATION) != 1:
        raise EnvironmentProblem(
            f"{file.relative_to(source)} does not declare AsGpuStreamValue as Horovod {HOROVOD_VERSION} "
            "does; delete the cached source and repeat."
        )
    file.write_text(text + _STREAM_DEFINITION)
