"""From the words of a command line to a command, and from what is wrong with them to a clear error.

Answers `--help` and wrong flags without importing TensorFlow.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import docstring_parser
import jsonargparse

from tfdist import __version__
from tfdist.commands import (
    ChaosCommand,
    CheckCommand,
    CheckpointsCommand,
    CompareCommand,
    EvaluateCommand,
    LaunchCommand,
    TrainCommand,
)
from tfdist.errors import UsageError, closest

__all__ = ["Command", "answer_help", "parse", "parted"]

Command = (
    TrainCommand | CheckCommand | CompareCommand | LaunchCommand | CheckpointsCommand | EvaluateCommand | ChaosCommand
)


def parse(arguments: Sequence[str]) -> Command:
    """The command that the words give. Raises UsageError where they give none."""
    try:
        values = _parser().parse_args(list(arguments))
    except RuntimeError:  # of the parser, over a mapping where it expects none
        raise UsageError(
            "the configuration has a mapping where a value or a list belongs. Write task_args: [name=value]."
        ) from None
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise _clear(" ".join(str(error).split()), arguments) from None
    name = values.command
    if name is None:
        raise UsageError("no command. Try: tfdist train --help")
    fields = {field.name for field in dataclasses.fields(_COMMANDS[name])}
    given: dict[str, Any] = {key: value for key, value in vars(values[name]).items() if key in fields}
    command: Command = _COMMANDS[name](
        **{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    )
    return command


def _clear(message: str, arguments: Sequence[str]) -> UsageError:
    """The parser's message as setting, value and way out."""
    command = next((name for name in _COMMANDS if name in arguments), "train")
    types = typing.get_type_hints(_COMMANDS[command])
    fields = set(types)
    unknown = re.search(r"[Uu]nrecognized arguments: --?([\w-]+)", message)
    if unknown:
        flag = unknown.group(1)
        name = flag.replace("-", "_")
        if command == "launch" and (name == "config" or name in typing.get_type_hints(TrainCommand)):
            return UsageError(f"--{flag} is a flag of tfdist train. Write it after --: tfdist launch … -- --{flag} …")
        if command == "train" and name in typing.get_type_hints(LaunchCommand):
            return UsageError(f"--{flag} is a flag of tfdist launch. Write it before --: tfdist launch --{flag} … -- …")
        near = closest(flag, [name.replace("_", "-") for name in fields])
        return UsageError(f"--{flag} is not a flag.{near} See: tfdist {command} --help")
    required = re.search(r"arguments are required: \w+\.(\w+)", message)
    if required:
        return UsageError(f"no {required.group(1)} is given. Write: tfdist {command} {required.group(1).upper()}")
    option = re.search(r"does not accept option '([\w.-]+)'", message)
    if option:
        return UsageError(f"{option.group(1)} is not a setting of tfdist {command}.{closest(option.group(1), fields)}")
    value = re.search(r'Parser key "(\w+)".*(?:Given|Got) value: (.*)$', message)
    if value and value.group(1) in fields:
        name, given = value.groups()
        kind = types[name]
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            return UsageError(f"{name}={given} must be one of {', '.join(choices)}.{closest(given, choices)}")
        words = "a whole number" if "int" in str(kind) else "a number" if "float" in str(kind) else f"of type {kind}"
        return UsageError(f"{name}={given} must be {words}.")
    return UsageError(message)


_GROUPS = {
    "what and where": (
        "task",
        "task_args",
        "backend",
        "replicas",
        "report",
        "trace",
        "export",
        "verbose",
        "quiet",
        "seed",
    ),
    "the same bits everywhere": ("reproducible", "virtual_shards"),
    "of single backends": ("parameter_servers", "max_in_flight", "sync_every", "collectives"),
    "how long": ("epochs", "steps", "global_batch_size", "accumulate", "shuffle_buffer"),
    "learning rate": (
        *("learning_rate", "lr_scaling", "lr_schedule", "warmup_steps", "warmup_epochs", "warmup_from_zero"),
        *("plateau_patience", "plateau_factor"),
    ),
    "loss and gradients": (
        *("loss_reduction", "clip_value", "clip_norm", "clip_global_norm", "nan_policy", "sparse", "compression"),
        "reduction",
    ),
    "weights and layers": ("weight_decay", "weight_decay_exclude", "ema", "batch_norm"),
    "precision and speed": (
        *("precision", "loss_scale", "loss_scale_growth", "jit", "steps_per_chunk", "intra_op_threads", "gpu_memory"),
    ),
    "evaluation and its consequences": (
        *("validate_every", "monitor", "monitor_mode", "min_delta", "patience", "restore_best"),
    ),
    "checkpoints and faults": (
        *("checkpoint_dir", "save_every", "keep", "keep_best", "resume", "init_from", "stop_after_steps"),
        *("check_every", "stall_timeout"),
    ),
}
"""In which the flags of `tfdist train` are shown."""

_METAVARS = {str: "WORD", int: "N", Path: "PATH"}

_COMMANDS: dict[str, type[Any]] = {
    "train": TrainCommand,
    "launch": LaunchCommand,
    "check": CheckCommand,
    "compare": CompareCommand,
    "checkpoints": CheckpointsCommand,
    "evaluate": EvaluateCommand,
    "chaos": ChaosCommand,
}


def _parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog="tfdist",
        description="Train TensorFlow models on native tf.distribute strategies or on Horovod over MPI.",
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"tfdist {__version__}")
    commands = parser.add_subcommands(required=False, dest="command")
    train = _command_parser(
        TrainCommand, "Train a task on a backend. Under mpirun every process runs the same command."
    )
    train.add_argument("--config", action="config", help="Read settings from a YAML file; later flags win.")
    commands.add_subcommand("train", train, help="train a task on a backend")
    launch = _command_parser(
        LaunchCommand,
        "Start tfdist train in several processes, and watch over them. Write the arguments of tfdist train after --, "
        "as in: tfdist launch --processes 2 -- --backend multi_worker_mirrored --steps 20",
    )
    commands.add_subcommand("launch", launch, help="start tfdist train in several processes, and watch over them")
    check = _command_parser(CheckCommand, "Run cases whose right values are known on the backends of this machine.")
    commands.add_subcommand("check", check, help="show that training gives the right values on this machine")
    compare = _command_parser(
        CompareCommand,
        "Run a task on several backends: whether their numbers agree, which is faster, and why. Further arguments of "
        "tfdist train may follow after --, as in: tfdist compare --backends horovod,mirrored -- --reproducible",
    )
    commands.add_subcommand("compare", compare, help="show that backends give the same numbers, and which is faster")
    evaluate = _command_parser(EvaluateCommand, "Evaluate the model of a checkpoint, on any backend.")
    commands.add_subcommand("evaluate", evaluate, help="evaluate the model of a checkpoint")
    checkpoints = _command_parser(CheckpointsCommand, "List checkpoints, look whether they are whole, and compare two.")
    commands.add_subcommand("checkpoints", checkpoints, help="list, verify and compare checkpoints")
    chaos = _command_parser(
        ChaosCommand, "Kill jobs at random moments, and see that they end as one does that is left alone."
    )
    commands.add_subcommand("chaos", chaos, help="show that jobs survive being killed on this machine")
    return parser


def _command_parser(command: type, description: str) -> jsonargparse.ArgumentParser:
    """One flag for each field of a command, with the field's type, default and documentation."""
    parser = jsonargparse.ArgumentParser(description=description, exit_on_error=False)
    groups = {title: parser.add_argument_group(title) for title in _GROUPS if command is TrainCommand}
    types = typing.get_type_hints(command)
    documentation = {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for cls in command.__mro__[:-1]
        for parameter in docstring_parser.parse_from_object(cls).params
    }
    order = [name for names in _GROUPS.values() for name in names]
    for field in sorted(dataclasses.fields(command), key=lambda f: order.index(f.name) if f.name in order else -1):
        option: dict[str, Any] = {"default": field.default, "help": documentation[field.name]}
        kind = types[field.name]
        if field.default is dataclasses.MISSING:
            parser.add_argument(field.name, type=kind, metavar=field.name.upper(), help=documentation[field.name])
            continue
        if kind is bool:
            option["action"] = "store_true"
        elif typing.get_origin(kind) is tuple:
            metavar = "NAME=VALUE" if field.name == "task_args" else _METAVARS[typing.get_args(kind)[0]]
            option |= {"type": typing.get_args(kind)[0], "nargs": "+", "metavar": metavar}
            option["default"] = list(getattr(command, field.name))
            if field.name == "task_args":
                option["action"] = "extend"
            if "metavar" in field.metadata:  # of a fixed number
                option |= {"metavar": field.metadata["metavar"], "nargs": len(field.metadata["metavar"])}
        else:
            option["type"] = kind
        title = next((title for title, names in _GROUPS.items() if field.name in names), "")
        groups.get(title, parser).add_argument(f"--{field.name.replace('_', '-')}", **option)
    return parser


def answer_help(arguments: Sequence[str], *, speaks: bool) -> None:
    """End here for a question (`--help`, `--version`, `--print_config`): every rank alike; one of them speaks."""
    if not any(a in ("-h", "--help", "--version") or a.startswith("--print_config") for a in arguments):
        return
    if speaks:
        own, theirs = parted(arguments)
        asks_launch = own[:1] == ["launch"] and any(word in ("-h", "--help", "--version") for word in own)
        _parser().parse_args(["train", *theirs] if own[:1] == ["launch"] and not asks_launch else own)
    raise SystemExit(0)


def parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first `--`, and those after it."""
    words = list(arguments)
    where = words.index("--") if "--" in words else len(words)
    return words[:where], words[where + 1 :]
