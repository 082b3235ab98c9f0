"""Disks that fail while a job saves, and checkpoints that are damaged between two starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import ROOT, Job, environment
from tfdist.checkpoints.checkpoint import all_in, find

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

TOY = ROOT / "tests" / "toy.py"


def train(folder: Path, *flags: object, task: str = "ToyNet", backend: str = "one_device", save_every: int = 10) -> Job:
    where = ["--task", f"{TOY}:{task}", "--backend", backend, "--validate-every", 0, "--report", folder / "report.json"]
    saves = ["--checkpoint-dir", folder / "checkpoints", "--save-every", save_every]
    words = ["-m", "tfdist", "train", *where, *saves, *flags]
    return Job([sys.executable, *map(str, words)], environment(None))


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return content


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 8 MiB in `folder/checkpoints`."""
    place = folder / "checkpoints"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting needs root")
    try:
        yield place
    finally:
        while place.is_mount():  # also what a test has mounted over it
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def first_save(job: Job, place: Path) -> None:
    deadline = time.monotonic() + 300
    while not place.exists() or not all_in(place):
        assert time.monotonic() < deadline, job.printed()
        time.sleep(0.01)


def fill(place: Path) -> None:
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


SLOW = ["--task-args", "seconds=0.05", "--steps-per-chunk", 2, "--steps", 80]


def test_a_full_disk_is_told_and_the_last_checkpoint_stays_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path) as place:
        job = train(tmp_path, *SLOW, task="Slow")
        first_save(job, place)
        fill(place)
        ended = job.finish(300)
        assert ended.code == 6, ended.output
        assert "Training goes on, and the next save tries again." in ended.output
        assert "No space left" in ended.output
        assert "Traceback" not in ended.output
        assert not find(place, print).problems()
        assert not [name for name in os.listdir(place) if name.startswith((".tmp", ".deleted"))]


def test_saving_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    with small_disk(tmp_path) as place:
        job = train(tmp_path, *SLOW, task="Slow")
        first_save(job, place)
        fill(place)
        job.wait_for("Training goes on", timeout=60)
        (place / "filler").unlink()
        job.finish(300).check()
        assert find(place, print).manifest.step == 80


def test_a_folder_that_becomes_read_only_is_told(tmp_path: Path) -> None:
    with small_disk(tmp_path) as place:
        job = train(tmp_path, *SLOW, task="Slow")
        first_save(job, place)
        # Over itself: what the job has open stays writable, and every path below leads to the new one.
        subprocess.run(["mount", "--bind", str(place), str(place)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        ended = job.finish(300)
        assert ended.code == 6, ended.output
        assert "Read-only file system" in ended.output
        assert not find(place, print).problems()
        again = train(tmp_path, *SLOW, task="Slow").finish(300)
        assert again.code == 2, again.output
        assert "cannot be written: Read-only file system" in again.output


@pytest.mark.parametrize("damage", ["a flipped bit", "a truncated file", "a missing file", "a missing manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_the_end_has_the_same_bits(damage: str, tmp_path: Path) -> None:
    (reference := tmp_path / "reference").mkdir()
    train(reference, "--steps", 80).finish(300).check()
    train(tmp_path, "--steps", 80, "--stop-after-steps", 50).finish(300).check()
    newest = all_in(tmp_path / "checkpoints")[-1]
    data = newest / "variables.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    if damage == "a flipped bit":
        content[len(content) // 3] ^= 8
        data.write_bytes(content)
    elif damage == "a truncated file":
        data.write_bytes(content[: len(content) // 2])
    else:
        (data if damage == "a missing file" else newest / "manifest.json").unlink()
    ended = train(tmp_path, "--steps", 80).finish(300).check()
    assert newest.name in ended.output and "passed over" in ended.output
    assert report(tmp_path)["resumed_from"] == 40
    assert report(tmp_path)["state_sha256"] == report(reference)["state_sha256"]


def test_a_second_job_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    slow = [*SLOW[:-1], 5000]
    first = train(tmp_path, *slow, task="Slow")
    first_save(first, tmp_path / "checkpoints")
    second = train(tmp_path, *slow, task="Slow").finish(300)
    assert second.code == 6, second.output  # a launcher may try again, when the first one has ended
    assert f"is in use by another job: process {first.pid} on host" in second.output
    os.kill(first.pid, signal.SIGTERM)
    assert first.finish(300).code == 75
