"""The command line: `tfdist train`, `python -m tfdist train` and `scripts/train.py` are the same.

Only the chief speaks. `--help` and wrong flags are answered without importing TensorFlow.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import docstring_parser
import jsonargparse

from tfdist import __version__
from tfdist.cluster.causes import account, cause_of
from tfdist.cluster.channel import Channel, together
from tfdist.cluster.identity import Identity, identify
from tfdist.config import Settings, TrainCommand
from tfdist.errors import TfdistError, UsageError, closest

if TYPE_CHECKING:
    from tfdist.strategies.session import Session

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    speaks = True
    channel: Channel | None = None
    try:
        identity = identify()
        # Under an MPI launcher one console shows all ranks; otherwise each process has its own.
        speaks = identity.is_chief or identity.launcher != "mpi"
        _answer_help(arguments, identity)
        from tfdist.strategies.session import process

        _, channel = process()
        command = together(channel, "reading the command line", lambda: _parse(arguments))
        _train(command, identity, channel)
    except KeyboardInterrupt:
        print("tfdist: interrupted", file=sys.stderr)
        return 130
    except TfdistError as error:
        if speaks:
            print(f"tfdist: error: {error}", file=sys.stderr, flush=True)
        if error.shared and channel is not None:
            channel.exchange("the end", None)  # the launcher ends all ranks as soon as one leaves with an error
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


def _train(command: TrainCommand, identity: Identity, channel: Channel) -> None:
    from tfdist.strategies.session import open_session

    # The backend first: TensorFlow's multi-worker strategy must be there before the task's module runs any operation.
    session = open_session(command.backend, command.replicas, command.intra_op_threads)
    if command.verbose:
        _show(session)

    from tfdist.tasks.load import load_task
    from tfdist.training import report
    from tfdist.training.trainer import Trainer

    if command.report is not None:
        path = command.report
        together(
            channel, "checking the report's path", lambda: report.check_writable(path) if identity.is_chief else None
        )
    task = together(channel, "loading the task", lambda: load_task(command.task, command.task_args))
    settings = {field.name: getattr(command, field.name) for field in dataclasses.fields(Settings)}
    result = Trainer(task, **settings).fit()
    if command.report is not None and identity.is_chief:
        report.write(result, command.report)


def _show(session: Session) -> None:
    """The resolved cluster, one line for each process, printed by the chief."""
    places = session.channel.exchange("showing the cluster", session.place())
    if session.is_chief:
        print(f"backend {session.backend}, {session.strategy.num_replicas_in_sync} replica(s) in sync")
        for place in places:
            print("  " + "  ".join(f"{name} {value}" for name, value in place.items()), flush=True)


def _parse(arguments: Sequence[str]) -> TrainCommand:
    parser = _parser()
    try:
        values = parser.parse_args(list(arguments)).train
    except jsonargparse.ArgumentError as error:
        raise _clear(" ".join(str(error).split())) from None
    if values is None:
        raise UsageError("no command. Try: tfdist train --help")
    fields = {field.name for field in dataclasses.fields(TrainCommand)}
    chosen = {name: value for name, value in vars(values).items() if name in fields}
    return TrainCommand(**chosen | {"task_args": tuple(chosen["task_args"])})


def _clear(message: str) -> UsageError:
    """The parser's message as setting, value and way out."""
    fields = {field.name for field in dataclasses.fields(TrainCommand)}
    unknown = re.search(r"[Uu]nrecognized arguments: --?([\w-]+)", message)
    if unknown:
        flag = unknown.group(1)
        near = closest(flag, [name.replace("_", "-") for name in fields])
        return UsageError(f"--{flag} is not a flag.{near} See: tfdist train --help")
    value = re.search(r'Parser key "(\w+)".*Given value: (.*)$', message)
    if value and value.group(1) in fields:
        name, given = value.groups()
        types = str(typing.get_type_hints(TrainCommand)[name])
        kind = "a whole number" if "int" in types else "a number" if "float" in types else f"of type {types}"
        return UsageError(f"{name}={given} must be {kind}.")
    return UsageError(message)


def _parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog="tfdist",
        description="Train TensorFlow models on native tf.distribute strategies or on Horovod over MPI.",
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"tfdist {__version__}")
    commands = parser.add_subcommands(required=False, dest="command")
    commands.add_subcommand("train", _train_parser(), help="train a task on a backend")
    return parser


def _train_parser() -> jsonargparse.ArgumentParser:
    """One flag for each field of `TrainCommand`, with the field's type, default and documentation."""
    parser = jsonargparse.ArgumentParser(
        description="Train a task on a backend. Under mpirun every process runs the same command.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="Read settings from a YAML file; later flags win.")
    types = typing.get_type_hints(TrainCommand)
    documentation = {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for cls in (TrainCommand, Settings)
        for parameter in docstring_parser.parse_from_object(cls).params
    }
    for field in dataclasses.fields(TrainCommand):
        option: dict[str, Any] = {"default": field.default, "help": documentation[field.name]}
        if types[field.name] is bool:
            option["action"] = "store_true"
        elif typing.get_origin(types[field.name]) is tuple:
            option |= {"type": str, "nargs": "+", "action": "extend", "metavar": "NAME=VALUE", "default": []}
        else:
            option["type"] = types[field.name]
        parser.add_argument(f"--{field.name.replace('_', '-')}", **option)
    return parser


def _answer_help(arguments: Sequence[str], identity: Identity) -> None:
    """End here for a question (`--help`, `--version`, `--print_config`): every rank alike, one answer."""
    if not any(a in ("-h", "--help", "--version") or a.startswith("--print_config") for a in arguments):
        return
    if identity.is_chief:
        _parser().parse_args(list(arguments))
    raise SystemExit(0)


def _tell(error: Exception) -> None:
    print(account(error), file=sys.stderr)
    where = " ".join(getattr(error, "__notes__", ()))
    print(f"tfdist: failed{f' {where}' if where else ''}: {cause_of(error)}", file=sys.stderr, flush=True)
