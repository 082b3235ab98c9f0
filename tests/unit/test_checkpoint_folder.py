"""Folders of checkpoints: one job at a time, disks that are full or read-only, and what is written in which order."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs import environment
from tests.unit.checkpoint_cases import FILES, ONE, STATE, hidden, silent, steps
from tfdist.checkpoints.store import Store
from tfdist.errors import CheckpointProblem, UsageError


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    with contextlib.ExitStack() as stack:

        def make(folder: Path = tmp_path, **options: Any) -> Store:
            store = Store(folder, **options)
            stack.callback(store.close)
            return store

        yield make


HOLDER = r"""
import os, sys, time
from pathlib import Path
from tfdist.checkpoints.store import Store
store = Store(Path(sys.argv[1]))
if "child" in sys.argv:
    if os.fork() == 0:
        os.write(1, b"%d\n" % os.getpid())  # whole lines: both processes write to one pipe
        time.sleep(60)
        os._exit(0)
os.write(1, b"open\n")
time.sleep(60)
"""


class TestOneJobAtATime:
    @pytest.mark.parametrize("child", [False, True])
    def test_another_process_has_it_until_it_is_killed(self, open_store: Any, tmp_path: Path, child: bool) -> None:
        words = [sys.executable, "-c", HOLDER, str(tmp_path), *(["child"] if child else [])]
        orphan = None
        with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment(None), text=True) as holder:
            assert holder.stdout is not None
            lines = [holder.stdout.readline().strip() for _ in range(1 + child)]
            assert "open" in lines
            orphan = next((int(line) for line in lines if line.isdigit()), None)
            try:
                with pytest.raises(CheckpointProblem) as caught:
                    open_store()
                assert f"is in use by another job: process {holder.pid} on host {os.uname().nodename}" in str(
                    caught.value
                )
                holder.send_signal(signal.SIGKILL)
                holder.wait(10)
                open_store().save(1, ONE, STATE)  # a child of the killed one, which lives on, does not have it
            finally:
                holder.kill()
                if orphan is not None:
                    os.kill(orphan, signal.SIGKILL)

    def test_the_lock_of_a_closed_store_is_free(self, open_store: Any, tmp_path: Path) -> None:
        first = open_store()
        with pytest.raises(CheckpointProblem, match=f"process {os.getpid()} on host"):
            open_store()
        first.close()
        first.close()
        second = open_store()
        with pytest.raises(CheckpointProblem, match="has been closed"):
            first.save(1, ONE, STATE)
        second.save(1, ONE, STATE)

    def test_a_lock_that_says_nothing_useful(self, open_store: Any, tmp_path: Path) -> None:
        open_store()
        for text in ("", "[]", '{"pid": "x"}', "\x00"):
            (tmp_path / ".lock").write_text(text)
            with pytest.raises(CheckpointProblem, match=r"is in use by another job\. Give another folder"):
                open_store()

    def test_a_removed_lock_file_is_made_again(self, open_store: Any, tmp_path: Path) -> None:
        open_store().close()
        (tmp_path / ".lock").unlink()
        open_store()
        with pytest.raises(CheckpointProblem, match="in use"):
            open_store()

    def test_what_killed_jobs_left_is_removed_and_nothing_else(self, open_store: Any, tmp_path: Path) -> None:
        for name in (".tmp-step-000000004-0a1b2c3d", ".deleted-step-000000001-00000000", ".mine", ".tmp-mine"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").touch()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "file").touch()
        (tmp_path / ".tmp-step-000000005-0a1b2c3d").symlink_to(elsewhere)
        open_store()
        assert sorted(os.listdir(tmp_path)) == [".lock", ".mine", ".tmp-mine", "elsewhere"]
        assert (elsewhere / "file").exists()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small file system in memory, or skips."""
    with contextlib.ExitStack() as stack:

        def make(name: str, options: str) -> Path:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", options, "tfdist-test", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return folder

        yield make


class TestFolders:
    def test_it_is_made_with_those_above(self, open_store: Any, tmp_path: Path) -> None:
        assert open_store(tmp_path / "a" / "b").save(1, ONE, STATE) == tmp_path / "a" / "b" / "step-000000001"

    def test_others_may_read_it_as_the_umask_says(self, open_store: Any, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            path = open_store().save(1, ONE, STATE)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o750
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}

    def test_a_file_is_no_folder(self, open_store: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(UsageError, match=r"cannot be written: it is a file, or lies below one\. Give another"):
                open_store(path)

    def test_a_read_only_file_system(self, open_store: Any, mount: Any) -> None:
        folder = mount("small", "size=1m,ro")
        with pytest.raises(UsageError, match="cannot be written: Read-only file system"):
            open_store(folder)
        with pytest.raises(UsageError, match="cannot be written: Read-only file system"):
            open_store(folder / "below")

    def test_a_folder_without_permission(self, open_store: Any, tmp_path: Path) -> None:
        if os.getuid() == 0:
            pytest.skip("root may write everywhere")
        tmp_path.chmod(0o500)
        with pytest.raises(UsageError, match="cannot be written: Permission denied"):
            open_store()

    @pytest.mark.parametrize("floats", [200_000, 230_000, 258_500, 10**6])
    def test_a_full_disk_leaves_the_older_one(self, open_store: Any, mount: Any, floats: int) -> None:
        folder = mount("small", "size=1m")
        store = open_store(folder)
        first = store.save(1, ONE, STATE)
        with pytest.raises(CheckpointProblem) as caught:
            store.save(2, {"large": np.zeros(floats, np.float32)}, {"text": "a" * 250_000})
        assert f"step 2 could not be written to {folder}: No space left on device (it needs" in str(caught.value)
        assert sorted(os.listdir(folder)) == [".lock", first.name]
        assert store.newest(silent).path == first
        store.save(3, ONE, STATE)

    def test_a_disk_that_is_full_from_the_start(self, open_store: Any, mount: Any) -> None:
        folder = mount("small", "size=64k")
        with contextlib.suppress(OSError):
            (folder / "large").write_bytes(bytes(2**20))
        with pytest.raises(UsageError, match="cannot be written: No space left on device"):
            open_store(folder)

    def test_a_folder_that_has_gone(self, open_store: Any, tmp_path: Path) -> None:
        store = open_store(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone")
        with pytest.raises(CheckpointProblem, match="No such file or directory"):
            store.save(1, ONE, STATE)


def test_everything_is_on_the_disk_before_it_becomes_visible_and_older_ones_go(
    open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(keep=1)
    store.save(1, ONE, STATE)
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def name(path: Any) -> str:
        path = Path(path)
        return path.name if path.name in FILES or path == tmp_path else path.name.rpartition("-")[0] or path.name

    monkeypatch.setattr(
        os, "fsync", lambda d: (done.append(f"sync {name(os.readlink(f'/proc/self/fd/{d}'))}"), fsync(d))[1]
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(f"to {Path(b).name[:14]}"), rename(a, b))[1])
    store.save(2, ONE, STATE)
    temporary = ".tmp-step-000000002"
    assert done == [
        "sync variables.index",
        "sync variables.data-00000-of-00001",
        "sync manifest.json",
        f"sync {temporary}",
        "to step-000000002",
        f"sync {tmp_path.name}",
        "to .deleted-step-",
    ]


def test_an_error_after_it_became_visible_takes_it_back(
    open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store.save(1, ONE, STATE)
    fsync = os.fsync

    def broken(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CheckpointProblem, match=r"step 2 could not be written to .*: Input/output error\. Earlier"):
        store.save(2, ONE, STATE)
    assert (steps(tmp_path), hidden(tmp_path)) == ([1], [])
