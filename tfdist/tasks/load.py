"""From `--task` and `--task-args` to a task."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonargparse

from tfdist.errors import UsageError, closest
from tfdist.training.task import Task

__all__ = ["BUILT_IN", "load_task"]

BUILT_IN = {"digits": "tfdist.tasks.digits:Digits"}


def load_task(spec: str, arguments: Sequence[str] = ()) -> Task:
    """Make a task.

    Args:
        spec: a name of `BUILT_IN`, `path/to/file.py:ClassName` or `package.module:ClassName`.
        arguments: `name=value` for fields of the task; the text becomes a value of the field's type.

    Raises:
        UsageError: there is no such file, module, class or field, or a value does not fit.
    """
    target = BUILT_IN.get(spec, spec)
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(
            f"task={spec!r} is neither a built-in task ({', '.join(BUILT_IN)}) nor path/to/file.py:ClassName nor "
            "package.module:ClassName." + closest(spec, BUILT_IN)
        )
    module = _from_file(spec, Path(place)) if place.endswith(".py") else _from_package(spec, place)
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        tasks = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task]
        there = f"It has {', '.join(tasks)}." if tasks else "It has no subclass of tfdist.Task."
        detail = f"no class {name!r}" if cls is None else f"{name!r}, but it is not a subclass of tfdist.Task"
        raise UsageError(f"task={spec!r}: {place} has {detail}. {there}")
    task = _with_arguments(spec, cls, arguments)
    # What a checkpoint says of its task, so that `tfdist evaluate` finds it.
    object.__setattr__(task, "loaded_from", [spec, *arguments])
    return task


def _from_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"task={spec!r}: there is no file {path} (looked in {Path.cwd()}).")
    name = f"tfdist_task_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.absolute().parent))  # a task may import its neighbours
    found.loader.exec_module(module)
    return module


def _from_package(spec: str, name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import inside of the task's module that fails is the task's own error, with its traceback.
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise
        raise UsageError(
            f"task={spec!r}: there is no module {name!r}. Install it or run from its folder; a file is given as "
            "path/to/file.py:ClassName."
        ) from None


def _with_arguments(spec: str, cls: type[Task], arguments: Sequence[str]) -> Task:
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    texts = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise UsageError(f"task_args={argument!r} is not of the form name=value.")
        if name not in fields:
            hint = "" if "__dataclass_fields__" in vars(cls) else f" Is {cls.__name__} decorated with @dataclass?"
            raise UsageError(
                f"task_args={argument!r}: the task {spec!r} has no field {name!r}; it has {', '.join(fields)}."
                + closest(name, fields)
                + hint
            )
        texts[name] = text
    for name, field in fields.items():
        if name not in texts and field.default is field.default_factory is dataclasses.MISSING:
            raise UsageError(f"task={spec!r} needs a value for {name!r}: --task-args {name}=…")
    return cls(**{name: _value(f"{name}={text}", text, _type(cls, name)) for name, text in texts.items()})


def _type(cls: type[Task], name: str) -> Any:
    """The type of one field. Those of the others may be importable for type checkers alone."""
    home = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    alone = type(name, (), {"__annotations__": {name: home.__annotations__[name]}, "__module__": home.__module__})
    return typing.get_type_hints(alone)[name]


def _value(argument: str, text: str, kind: Any) -> Any:
    """The text as a value of the field's type."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        return parser.parse_args([f"--value={text}"]).value
    except (jsonargparse.ArgumentError, TypeError, ValueError):
        words = getattr(kind, "__name__", str(kind))
        raise UsageError(f"task_args={argument!r} is not a value of type {words}.") from None
