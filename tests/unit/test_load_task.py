"""From `--task` and `--task-args` to a task."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfdist.errors import UsageError
from tfdist.tasks.digits import Digits
from tfdist.tasks.load import BUILT_IN, load_task

SOURCE = """
from __future__ import annotations

import dataclasses
import typing

from tfdist import Task

@dataclasses.dataclass(kw_only=True)
class Mine(Task):
    width: int = 8
    rate: float = 0.5
    flag: bool = False
    name: str = "relu"
    sizes: list[float] = dataclasses.field(default_factory=list)
    depth: int | None = None
    label: str | None = "x"
    made: int = dataclasses.field(default=0, init=False)

@dataclasses.dataclass(kw_only=True)
class Checked(Task):
    width: int = 8

    def __post_init__(self):
        if self.width % 8:
            from tfdist import UsageError
            raise UsageError(f"width={self.width} must be a multiple of 8.")

class Undecorated(Task):
    width: int = 8

@dataclasses.dataclass(kw_only=True)
class Needs(Task):
    width: int

if typing.TYPE_CHECKING:
    from fractions import Fraction

@dataclasses.dataclass(kw_only=True)
class Typed(Task):
    ratio: Fraction | None = None
    width: int = 8

@dataclasses.dataclass(kw_only=True)
class Helped(Task):
    help: str = "x"

class Other:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module, as the current one; sys.path and sys.modules come back as they were."""
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    (tmp_path / "own_task.py").write_text(SOURCE)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("own_task", "own_package", "neighbour", "broken") or name.startswith("tfdist_task_"):
            del sys.modules[name]


def refusal(spec: str, *arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_task(spec, arguments)
    return str(caught.value)


def test_a_built_in_task() -> None:
    assert load_task("digits") == Digits()
    assert load_task("digits", ["filters=4", "epochs=2"]) == Digits(filters=4, epochs=2)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_task_loads(name: str) -> None:
    load_task(name)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_file(folder: Path, absolute: bool) -> None:
    task = load_task(f"{folder / 'own_task.py' if absolute else 'own_task.py'}:Mine")
    assert type(task).__name__ == "Mine"
    assert (task.width, task.epochs) == (8, 1)  # type: ignore[attr-defined]


def test_a_file_may_import_its_neighbours(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "neighbour.py").write_text("WIDTH = 77\n")
    (folder / "sub" / "far.py").write_text(
        "import dataclasses\nfrom neighbour import WIDTH\nfrom tfdist import Task\n"
        "@dataclasses.dataclass(kw_only=True)\nclass Mine(Task):\n    width: int = WIDTH\n"
    )
    assert load_task("sub/far.py:Mine").width == 77  # type: ignore[attr-defined]


def test_a_module_of_the_current_folder(folder: Path) -> None:
    (folder / "own_package").mkdir()
    (folder / "own_package" / "__init__.py").write_text("")
    (folder / "own_package" / "tasks.py").write_text(SOURCE)
    assert load_task("own_task:Mine").width == 8  # type: ignore[attr-defined]
    assert load_task("own_package.tasks:Mine", ["width=9"]).width == 9  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("width=16", "width", 16),
        ("width=-3", "width", -3),
        ("rate=0.25", "rate", 0.25),
        ("rate=1e-3", "rate", 1e-3),
        ("rate=2", "rate", 2.0),
        ("flag=true", "flag", True),
        ("flag=True", "flag", True),
        ("flag=false", "flag", False),
        ("name=silu", "name", "silu"),
        ("name=123", "name", "123"),
        ("name=", "name", ""),
        ("name=a=b c", "name", "a=b c"),
        ("name=--x", "name", "--x"),
        ("sizes=[1, 2.5]", "sizes", [1.0, 2.5]),
        ("sizes=[]", "sizes", []),
        ("depth=4", "depth", 4),
        ("depth=null", "depth", None),
        ("label=null", "label", None),
        ("label=y", "label", "y"),
        ("learning_rate=0.125", "learning_rate", 0.125),  # a field of the base class
    ],
)
def test_text_becomes_a_value_of_the_type_of_the_field(folder: Path, text: str, name: str, value: Any) -> None:
    got = getattr(load_task("own_task.py:Mine", [text]), name)
    assert got == value
    assert type(got) is type(value)


def test_several_fields_and_the_last_word(folder: Path) -> None:
    task: Any = load_task("own_task.py:Mine", ["width=1", "name=a", "width=2"])
    assert (task.width, task.name, task.rate) == (2, "a", 0.5)


@pytest.mark.parametrize("text", ["width=three", "width=1.5", "rate=fast", "flag=maybe", "sizes=[a]", "depth=x"])
def test_a_value_of_another_type_is_refused(folder: Path, text: str) -> None:
    message = refusal("own_task.py:Mine", text)
    assert message.startswith(f"task_args={text!r} is not a value of type ")
    assert "\n" not in message


def test_an_argument_without_a_value_is_refused(folder: Path) -> None:
    assert refusal("own_task.py:Mine", "width") == "task_args='width' is not of the form name=value."


def test_an_unknown_field_is_answered_with_the_nearest(folder: Path) -> None:
    message = refusal("own_task.py:Mine", "widht=3")
    assert "has no field 'widht'" in message
    assert "epochs, global_batch_size, learning_rate, width, rate, flag" in message
    assert message.endswith("Did you mean 'width'?")
    assert "has no field 'made'" in refusal("own_task.py:Mine", "made=3"), "init=False"


def test_fields_of_a_class_without_decorator_are_explained(folder: Path) -> None:
    message = refusal("own_task.py:Undecorated", "width=3")
    assert message.endswith("Is Undecorated decorated with @dataclass?")


def test_a_check_of_the_task_itself_comes_through(folder: Path) -> None:
    assert refusal("own_task.py:Checked", "width=3") == "width=3 must be a multiple of 8."


def test_a_field_without_a_default(folder: Path) -> None:
    assert load_task("own_task.py:Needs", ["width=3"]).width == 3  # type: ignore[attr-defined]


def test_a_field_without_a_value_is_named(folder: Path) -> None:
    assert "width" in refusal("own_task.py:Needs")


@pytest.mark.parametrize("arguments", [(), ("width=3",)], ids=str)
def test_types_that_are_imported_for_checkers_only_do_no_harm(folder: Path, arguments: tuple[str, ...]) -> None:
    assert load_task("own_task.py:Typed", arguments).width == (3 if arguments else 8)  # type: ignore[attr-defined]


def test_a_field_may_have_any_name(folder: Path) -> None:
    assert load_task("own_task.py:Helped", ["help=y"]).help == "y"  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", ["digit", "own_task.py", "Mine", ":Mine", "own_task.py:"])
def test_a_spec_without_a_place_or_a_class(folder: Path, spec: str) -> None:
    message = refusal(spec)
    assert message.startswith(f"task={spec!r} is neither a built-in task (digits)")
    assert message.endswith("Did you mean 'digits'?") == (spec == "digit")


def test_a_file_that_is_not_there(folder: Path) -> None:
    message = refusal("nowhere/my.py:Mine")
    assert "there is no file nowhere/my.py" in message
    assert str(folder) in message


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.tasks", "own_task.deeper"])
def test_a_module_that_is_not_there(folder: Path, name: str) -> None:
    assert f"there is no module {name!r}" in refusal(f"{name}:Mine")


@pytest.mark.parametrize("place", ["own_task.py", "own_task"])
def test_a_class_that_is_not_there_or_no_task(folder: Path, place: str) -> None:
    missing, other = refusal(f"{place}:Missing"), refusal(f"{place}:Other")
    assert f"{place} has no class 'Missing'. It has Mine, Checked, Undecorated, Needs, Typed, Helped." in missing
    assert f"{place} has 'Other', but it is not a subclass of tfdist.Task." in other
    (folder / "broken.py").write_text("")
    assert "It has no subclass of tfdist.Task." in refusal("broken.py:Mine")


@pytest.mark.parametrize("spec", ["broken.py:Mine", "broken:Mine"])
def test_an_error_inside_of_the_module_is_that_of_the_task(folder: Path, spec: str) -> None:
    (folder / "broken.py").write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_task(spec)
