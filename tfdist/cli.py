"""The command line: `tfdist train`, `launch`, `check`, `checkpoints` and more. `scripts/train.py` is the first of them.

Only the chief speaks. `--help` and wrong flags are answered without importing TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.cluster import runtime
from tfdist.cluster.causes import account, cause_of
from tfdist.cluster.channel import Channel, together
from tfdist.cluster.ending import PATIENCE_SECONDS, end_together
from tfdist.cluster.identity import Identity, identify
from tfdist.command_line import answer_help, parse, parted
from tfdist.commands import (
    ChaosCommand,
    CheckCommand,
    CheckpointsCommand,
    CompareCommand,
    EvaluateCommand,
    LaunchCommand,
    TrainCommand,
)
from tfdist.config import Settings
from tfdist.errors import TfdistError, UsageError

if TYPE_CHECKING:
    from tfdist.strategies.session import Session

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    speaks = True
    identity = Identity(launcher="alone")
    channel: Channel | None = None
    try:
        identity = identify()
        speaks = identity.is_chief or not identity.one_console
        answer_help(arguments, speaks=identity.is_chief)
        if arguments[:1] == ["launch"]:
            return _launch(arguments, identity)
        if arguments[:1] == ["checkpoints"]:
            return _checkpoints(arguments, identity)
        if arguments[:1] == ["chaos"]:
            return _chaos(arguments, identity)
        if arguments[:1] == ["compare"]:
            return _compare(arguments, identity)
        from tfdist.strategies.session import process

        _, channel = process()
        command = together(channel, "reading the command line", lambda: parse(arguments))
        if isinstance(command, CheckCommand):
            return _check(command, identity)
        if isinstance(command, EvaluateCommand):
            from tfdist.evaluating import evaluate

            evaluate(command, identity)
            return 0
        assert isinstance(command, TrainCommand)
        _train(command, identity)
    except KeyboardInterrupt:
        print("tfdist: interrupted", file=sys.stderr)
        return 130
    except TfdistError as error:
        # Ranks of MPI and SLURM come to an error alike; others can fail alone.
        if speaks or (identity.launcher == "tf_config" and not error.shared):
            print(f"tfdist: error: {error}", file=sys.stderr, flush=True)
        if error.shared and channel is not None:
            end_together(channel)(PATIENCE_SECONDS)  # the launcher ends all ranks as soon as one leaves with an error
        elif not speaks:
            time.sleep(1)  # for the chief's message, likewise
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as error:  # of a job with one process: the task's own code
        _tell(error)
        return 1
    return 0


def _train(command: TrainCommand, identity: Identity) -> None:
    from tfdist.strategies.session import open_session

    # The backend first: TensorFlow's multi-worker strategy must be there before the task's module runs any operation.
    session = open_session(command.backend, command.options)
    channel = session.channel
    if command.verbose:
        _show(session)

    from tfdist.tasks.load import load_task
    from tfdist.training import report
    from tfdist.training.exporting import check_export
    from tfdist.training.trainer import Trainer

    for name, path in (("report", command.report), ("trace", Path(command.trace) if command.trace else None)):
        if path is not None:
            check = functools.partial(report.check_writable, setting=name)
            together(channel, f"checking {name}", functools.partial(_if_chief, identity, check, path))
    for path in command.export:
        together(channel, "checking export", functools.partial(_if_chief, identity, check_export, path))
    task = together(channel, "loading the task", lambda: load_task(command.task, command.task_args))
    settings = {field.name: getattr(command, field.name) for field in dataclasses.fields(Settings)}
    trainer = Trainer(task, **settings)
    result = trainer.fit()
    for path in command.export:
        trainer.export(path)
    if command.report is not None and identity.is_chief:
        report.write(result, command.report)
    # Input pipelines run on in the background. One that calls Python must be gone before the interpreter ends.
    del trainer
    gc.collect()


def _if_chief(identity: Identity, check: Callable[[Path], None], path: Path) -> None:
    if identity.is_chief:
        check(path)


def _launch(arguments: Sequence[str], identity: Identity) -> int:
    if identity.launcher != "alone":
        raise UsageError("tfdist launch starts its own processes. Run it without mpirun or TF_CONFIG.")
    from tfdist.launching import launch

    own, theirs = parted(arguments)
    command = parse(own)
    train = parse(["train", *theirs])
    assert isinstance(command, LaunchCommand) and isinstance(train, TrainCommand)
    return launch(command, train, theirs)


def _check(command: CheckCommand, identity: Identity) -> int:
    if identity.launcher != "alone":
        raise UsageError("tfdist check starts its own processes. Run it without mpirun or TF_CONFIG.")
    runtime.import_tensorflow()
    from tfdist.evidence.check import check
    from tfdist.training.report import check_writable

    if command.json is not None:
        check_writable(command.json, "json")
    _leave_on_sigterm()
    return 0 if check(command) else 1


def _chaos(arguments: Sequence[str], identity: Identity) -> int:
    if identity.launcher != "alone":
        raise UsageError("tfdist chaos starts its own processes. Run it without mpirun or TF_CONFIG.")
    command = parse(arguments)
    assert isinstance(command, ChaosCommand)
    from tfdist.evidence.chaos import chaos
    from tfdist.training.report import check_writable

    if command.json is not None:
        check_writable(command.json, "json")
    _leave_on_sigterm()
    return 0 if chaos(command) else 1


def _leave_on_sigterm() -> None:
    """As after Ctrl-C, the runs that were started are ended, too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _compare(arguments: Sequence[str], identity: Identity) -> int:
    if identity.launcher != "alone":
        raise UsageError("tfdist compare starts its own processes. Run it without mpirun or TF_CONFIG.")
    own, theirs = parted(arguments)
    command = parse(own)
    assert isinstance(command, CompareCommand)
    # They may be there in full, shortened, or in a file that --config names; what is the default changes nothing.
    given, usual = parse(["train", *theirs]), TrainCommand()
    for name, instead in _SET_BY_COMPARE.items():
        field = name.replace("-", "_")
        written = any(word.split("=")[0] == f"--{name}" for word in theirs)
        if written or getattr(given, field) != getattr(usual, field):
            raise UsageError(f"--{name} belongs to tfdist compare{instead}. Write it before --, or leave it out.")
    words = [*theirs, "--task", command.task]
    words += ["--task-args", *command.task_args] if command.task_args else []
    train = parse(["train", *words, "--steps", str(command.steps)])
    assert isinstance(train, TrainCommand)
    from tfdist.evidence.compare import compare
    from tfdist.training.report import check_writable

    for name, path in (("json", command.json), ("html", command.html)):
        if path is not None:
            check_writable(path, name)
    _leave_on_sigterm()
    return 0 if compare(command, train, words, " ".join(["tfdist", *map(shlex.quote, arguments)])) else 1


_SET_BY_COMPARE = {
    "backend": ", as --backends",
    "replicas": "",
    "steps": "",
    "task": "",
    "task-args": "",
    "report": ", which has --json",
    "trace": ", which writes its own",
    "checkpoint-dir": ", whose runs save nothing",
    "resume": ", whose runs begin anew",
    "epochs": ", which counts in --steps",
    "export": ", whose runs keep nothing",
}


def _checkpoints(arguments: Sequence[str], identity: Identity) -> int:
    command = parse(arguments)
    assert isinstance(command, CheckpointsCommand)
    if not identity.is_chief:
        return 0  # one answer is enough
    from tfdist.checkpoints import show
    from tfdist.training.report import check_writable

    if command.json is not None:
        check_writable(command.json, "json")
    if command.diff:
        runtime.prepare(identity)
        runtime.import_tensorflow()
        show.differences(command.folder, command.diff, command.json)
        return 0
    whole = show.listing(command.folder, verify=command.verify, json_file=command.json)
    return 0 if whole or not command.verify else 1


def _show(session: Session) -> None:
    """The resolved cluster as a table, one row for each process, printed by the chief."""
    places = session.places()
    if not session.is_chief:
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    print(session.headline())
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in places[0]:
        table.add_column(name, overflow="fold")
    for place in places:
        table.add_row(*map(str, place.values()))
    width = runtime.terminal_width(session.identity)
    Console(width=width or 140, force_terminal=width is not None).print(table)
    sys.stdout.flush()


def _tell(error: Exception) -> None:
    print(account(error), file=sys.stderr)
    where = " ".join(getattr(error, "__notes__", ()))
    print(f"tfdist: failed{f' {where}' if where else ''}: {cause_of(error)}", file=sys.stderr, flush=True)
