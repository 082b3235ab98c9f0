"""`scripts/train.py` as a user starts it: what it prints, writes and ends with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.full import full
from tests.jobs import LIMIT, ROOT, Ended, run_alone, run_mpi

TRAIN = ROOT / "scripts" / "train.py"
TOY = ROOT / "tests" / "toy.py"
PROGRAM = Path(__file__).with_name("command_program.py")

BACKENDS_OF_PROCESSES = ["horovod", "multi_worker_mirrored"]


def ours(job: Ended) -> list[str]:
    """The lines that tfdist itself printed."""
    return [line for line in job.output.splitlines() if line.startswith("tfdist:")]


def refused(job: Ended, *parts: str) -> None:
    """The job ended with exit code 2 and one message that holds all parts."""
    assert job.code == 2, job.output[-3000:]
    assert len(ours(job)) == 1, job.output[-3000:]
    assert "Traceback" not in job.output
    for part in parts:
        assert part in ours(job)[0]


def test_help_leaves_tensorflow_alone() -> None:
    command = [sys.executable, "-X", "importtime", TRAIN, "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    for flag in ("--backend", "--task-args", "--global-batch-size", "--steps-per-chunk", "--report", "--replicas"):
        assert flag in answer.stdout
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in answer.stderr.splitlines()}
    assert not imported & {"tensorflow", "keras", "horovod", "jax", "sklearn"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, dict[str, Any]]]:
    """The commands of the README, each with two replicas: what they printed, and their reports."""
    folder = tmp_path_factory.mktemp("reports")
    several = ["--backend", "multi_worker_mirrored"]

    def common(name: str) -> list[Any]:
        return ["--steps", 20, "--report", folder / f"{name}.json"]

    ended = {
        "horovod": run_mpi(2, TRAIN, *common("horovod")),
        "mirrored": run_alone(TRAIN, "--backend", "mirrored", "--replicas", "2", *common("mirrored")),
        "launch": run_alone("-m", "tfdist", "launch", "--processes", 2, "--", *several, *common("launch"), "--quiet"),
    }
    if full():  # test_right_values.py has this backend under mpirun
        ended["multi_worker"] = run_mpi(2, TRAIN, *several, *common("multi_worker"))
    return {name: (job.check(), json.loads((folder / f"{name}.json").read_text())) for name, job in ended.items()}


@pytest.fixture(scope="module")
def reports(jobs: dict[str, tuple[Ended, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {name: report for name, (_, report) in jobs.items()}


def test_two_replicas_give_the_same_bits_on_every_backend(reports: dict[str, dict[str, Any]]) -> None:
    assert len(reports) == (4 if full() else 3)
    for key in ("weights_sha256", "state_sha256"):
        assert len({report[key] for report in reports.values()}) == 1
    assert len({tuple(report["losses"]) for report in reports.values()}) == 1


def test_the_report_holds_what_it_promises(reports: dict[str, dict[str, Any]]) -> None:
    for name, report in reports.items():
        backend = {"multi_worker": "multi_worker_mirrored", "launch": "multi_worker_mirrored"}.get(name, name)
        assert report["backend"] == backend
        assert report["processes"] == (1 if name == "mirrored" else 2)
        assert report["replicas_in_sync"] == 2
        assert report["global_batch_size"] == 32
        assert report["steps"] == len(report["losses"]) == 20
        assert report["examples_seen"] == 640
        assert 0 < report["metrics"]["test"]["accuracy"] <= 1
        assert 0 < report["step_time_ms"]["p10"] <= report["step_time_ms"]["median"] <= report["step_time_ms"]["p90"]
        assert report["examples_per_second"] > 0
        assert set(report["traces"].values()) == {1}
        assert report["intra_op_threads"] >= 1
        assert {"python", "tensorflow", "keras", "numpy", "tfdist"} <= set(report["versions"])


def test_the_chief_alone_speaks_and_mpirun_defaults_to_horovod(jobs: dict[str, tuple[Ended, dict[str, Any]]]) -> None:
    output = jobs["horovod"][0].output
    assert output.count("training on horovod, 2 replicas") == 1
    assert output.count("test: loss") == 1
    assert "\x1b" not in output, "no terminal, so no bar"


def test_launch_says_nothing_of_its_own(jobs: dict[str, tuple[Ended, dict[str, Any]]]) -> None:
    assert jobs["launch"][0].output == ""


@pytest.mark.parametrize("backend", BACKENDS_OF_PROCESSES)
def test_one_failing_rank_ends_the_job_and_is_named(backend: str) -> None:
    flags = ["--backend", backend, "--task", f"{TOY}:Failing", "--steps", "50"]
    job = run_mpi(3, TRAIN, *flags)
    assert job.code not in (0, 124), job.output[-3000:]
    last = ours(job)[-1]
    assert "rank 1 of 3" in last
    assert "step 7" in last
    assert "ValueError: the sky is falling" in last
    assert job.output.count("Traceback (most recent call last)") <= 2  # the task's, with TensorFlow's copy in its text


# test_right_values.py has both backends, and test_strategy_jobs.py the end of the processes on the other one.
@pytest.mark.parametrize("backend", ["horovod", pytest.param("multi_worker_mirrored", marks=pytest.mark.full)])
def test_ranks_of_different_shapes_end_the_job(backend: str) -> None:
    job = run_mpi(2, TRAIN, "--backend", backend, "--task", f"{TOY}:OwnShape")
    assert job.code not in (0, 124), job.output[-3000:]
    assert len(ours(job)) == 1
    assert "hidden/kernel" in ours(job)[0]
    assert "(8, 17)" in ours(job)[0]
    assert "(8, 16)" in ours(job)[0]


BAD_FLAGS: list[tuple[list[str], list[str]]] = [
    (["--backend", "horovid"], ["backend='horovid'", "Did you mean 'horovod'?"]),
    (["--stps", "3"], ["--stps is not a flag", "Did you mean 'steps'?"]),
    (["--steps", "0"], ["steps=0"]),
    (["--steps", "many"], ["steps=many must be a whole number"]),
    (["--global-batch-size", "-1"], ["global_batch_size=-1"]),
    (["--steps", "3", "--epochs", "3"], ["epochs=3", "steps=3"]),
    (["--learning-rate", "nan"], ["learning_rate=nan", "a number"]),
    (["--precision", "float17"], ["precision=float17", "bfloat16", "Did you mean 'float16'?"]),
    (["--clip-norm", "1", "--clip-value", "1"], ["clip_value=1.0 and clip_norm=1.0 are both set", "Leave one"]),
    (["--monitor", "test/accurcy"], ["monitor='test/accurcy'", "test/loss, test/accuracy"]),
    (["--task", "nowhere.py:Task"], ["nowhere.py"]),
    (["--task", f"{TOY}:Missing"], ["'Missing'", "ToyLine"]),
    (["--task", f"{TOY}:NoTask"], ["'NoTask'", "not a subclass of tfdist.Task"]),
    (["--task", "no.such.module:Task"], ["no.such.module"]),
    (["--task", "digit"], ["Did you mean 'digits'?"]),
    (["--task-args", "filtres=3"], ["filtres", "Did you mean 'filters'?"]),
    (["--task-args", "filters=three"], ["filters", "three"]),
    (["--report", "/nowhere/at/all.json"], ["/nowhere/at/all.json"]),
    (["--report", "/"], ["it is a folder"]),
    (["--replicas", "2", "--backend", "horovod"], ["replicas=2"]),
    (["--replicas", "2", "--backend", "one_device"], ["replicas=2"]),
    (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
]
BAD_UNDER_MPIRUN: list[tuple[list[str], list[str]]] = [
    (["--backend", "mirrored"], ["backend='mirrored'", "the launcher started 2", "--backend horovod"]),
    (["--steps", "0"], ["steps=0"]),
    (["--task", f"{TOY}:Missing"], ["'Missing'"]),
    (["--report", "/nowhere/at/all.json"], ["/nowhere/at/all.json"]),
    (["--task", f"{TOY}:Broken", "--task-args", "wrong=scalar loss"], ["the loss has shape ()"]),
    (["--task", f"{TOY}:Broken", "--task-args", "wrong=negative weight"], ["step 1: a weight is negative"]),
    (["--task", f"{TOY}:Broken", "--task-args", "wrong=loss of another length"], ["step 1: the loss must have one"]),
]


def test_bad_flags_are_refused_before_training(tmp_path: Path) -> None:
    commands = [["train", *flags] for flags, _ in BAD_FLAGS] + [["check", "--cases", "unevn"]]
    run_alone(PROGRAM, tmp_path, json.dumps(commands)).check()
    results = json.loads((tmp_path / "0.json").read_text())
    told = [parts for _, parts in BAD_FLAGS] + [["cases='unevn'", "uneven-rows"]]
    for (code, output), parts in zip(results, told, strict=True):
        refused(Ended(code, output), *parts)


def test_bad_input_is_told_once_under_mpirun(tmp_path: Path) -> None:
    commands = [["train", *flags] for flags, _ in BAD_UNDER_MPIRUN]
    run_mpi(2, PROGRAM, tmp_path, json.dumps(commands)).check()
    chief, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for (code, output), (code_1, output_1), (_, parts) in zip(chief, other, BAD_UNDER_MPIRUN, strict=True):
        refused(Ended(code, output), *parts)
        assert code_1 == 2
        assert not ours(Ended(code_1, output_1)), "the chief alone speaks"


@pytest.mark.parametrize(("ranks", "flags"), [(1, ["--stps", "3"]), (2, ["--steps", "0"])], ids=["alone", "mpirun"])
def test_bad_flags_end_the_processes(ranks: int, flags: list[str]) -> None:
    refused(run_alone(TRAIN, *flags) if ranks == 1 else run_mpi(ranks, TRAIN, *flags), flags[0].strip("-"))


def test_a_launcher_whose_processes_do_not_find_each_other_is_refused() -> None:
    alone = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    job = run_alone(TRAIN, "--steps", "1", env=alone)
    assert job.code == 3, job.output
    assert "the launcher says rank 0 of 2 processes, but MPI says rank 0 of 1" in ours(job)[-1]


def test_without_horovod_the_other_backends_run(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = staticmethod(\n"
        "    lambda name, *args: None if name.split('.')[0] == 'horovod' else find(name, *args)\n"
        ")\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    job = run_mpi(2, TRAIN, "--steps", "1", env=environment)
    assert job.code == 3, job.output
    assert len(ours(job)) == 1
    assert "Horovod is not installed" in ours(job)[0]
    assert "python -m hvd_backend.build" in ours(job)[0]
    toy = ["--steps", "1", "--task", f"{TOY}:ToyLine", "--backend"]
    run_alone(TRAIN, *toy, "mirrored", "--replicas", "2", env=environment).check()


def test_settings_come_from_a_file_and_flags_win_and_jax_is_not_imported(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("backend: one_device\nsteps: 3\nglobal_batch_size: 8\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom tfdist.cli import main\ncode = main(['train', *sys.argv[1:]])\n"
        "found = [name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib')]\n"
        "sys.exit(code or (f'imported {found}' if found else 0))\n"
    )
    report = tmp_path / "report.json"
    run_alone(program, "--config", config, "--steps", "2", "--report", report).check()
    written = json.loads(report.read_text())
    assert (written["backend"], written["steps"], written["global_batch_size"]) == ("one_device", 2, 8)


@pytest.mark.parametrize("name", ["strategy_guide.py", "keras_fit.py"])
def test_the_examples_give_the_same_on_every_strategy(name: str) -> None:
    example = ROOT / "docs" / "examples" / name
    # test_strategy_contract.py has the same programs on all backends.
    jobs = [run_mpi(2, example, "--strategy", "horovod", "--epochs", "1").check()]
    if full():
        jobs.append(run_mpi(2, example, "--strategy", "multi_worker_mirrored", "--epochs", "1").check())
        jobs.append(run_alone(example, "--strategy", "mirrored", "--replicas", "2", "--epochs", "1").check())
    results = [line for job in jobs for line in job.output.splitlines() if line.startswith("loss ")]
    assert len(results) == (5 if full() else 2)
    assert len(set(results)) == 1


def test_the_gan_gives_the_same_on_every_backend(tmp_path: Path) -> None:
    common = ["--task", f"{ROOT / 'docs' / 'examples' / 'gan.py'}:Gan", "--steps", "8", "--report"]
    run_mpi(2, TRAIN, *common, tmp_path / "horovod.json").check()
    run_alone(TRAIN, "--backend", "mirrored", "--replicas", "2", *common, tmp_path / "mirrored.json").check()
    horovod, mirrored = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("horovod", "mirrored"))
    assert horovod["weights_sha256"] == mirrored["weights_sha256"]
    assert horovod["parts"] == mirrored["parts"]
    assert set(horovod["parts"]) == {"generator", "discriminator"}
    assert horovod["losses"] == pytest.approx(
        [sum(pair) for pair in zip(*(part["losses"] for part in horovod["parts"].values()), strict=True)], rel=1e-6
    )


def test_check_tells_right_from_wrong(tmp_path: Path) -> None:
    """A case with another right value must fail, and the rest of the table must not."""
    program = tmp_path / "program.py"
    program.write_text(
        "import dataclasses, sys\n"
        "from tfdist.cli import main\n"
        "from tfdist.evidence.cases import CASES\n"
        "wrong = dataclasses.replace(CASES['uneven-rows'], right=lambda replicas: [1.39, 1.78])\n"
        "CASES['uneven-rows'] = wrong\n"
        "sys.exit(main(['check', '--backends', 'mirrored', '--cases', 'uneven', 'reported', '--json', sys.argv[1]]))\n"
    )
    job = run_alone(program, tmp_path / "check.json")
    assert job.code == 1, job.output
    written = json.loads((tmp_path / "check.json").read_text())
    assert not written["passed"]
    passed = {(r["case"], r["backend"]): r["passed"] for r in written["results"]}
    assert passed == {
        ("uneven-rows", "one_device"): False,
        ("uneven-rows", "mirrored"): False,
        ("reported-loss", "one_device"): True,
        ("reported-loss", "mirrored"): True,
    }
    assert "FAIL uneven-rows on mirrored with 2 replica(s)" in job.output
    assert "2 of 4 values are right" in job.output


def test_the_task_of_the_readme_trains(tmp_path: Path) -> None:
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "wine.py").write_text(block)
    report = tmp_path / "report.json"
    run_alone(TRAIN, "--task", f"{tmp_path / 'wine.py'}:Wine", "--report", report).check()
    assert json.loads(report.read_text())["metrics"]["test"]["accuracy"] > 0.9
