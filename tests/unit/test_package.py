"""What `import tfdist` promises."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

import tfdist
from tests.jobs import ROOT


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tfdist.__version__ == project["version"]


def test_all_names_resolve() -> None:
    assert len(set(tfdist.__all__)) == len(tfdist.__all__)
    for name in tfdist.__all__:
        value = getattr(tfdist, name)
        assert name == "__version__" or value.__name__ == name
    assert dir(tfdist) == sorted(tfdist.__all__)


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'tfdist' has no attribute 'Trainr'"):
        tfdist.Trainr  # noqa: B018


@pytest.mark.parametrize(
    ("used", "heavy"),
    [
        ("", ["tensorflow", "keras", "horovod", "mpi4py", "numpy", "rich", "jsonargparse"]),
        ("tfdist.UsageError, tfdist.Settings", ["tensorflow", "keras", "horovod", "mpi4py"]),
    ],
    ids=["import", "errors and settings"],
)
def test_importing_costs_nothing(used: str, heavy: list[str]) -> None:
    program = (
        f"import sys, tfdist\n{used}\n"
        f"found = set({heavy}) & {{name.split('.')[0] for name in sys.modules}}\n"
        "sys.exit(', '.join(sorted(found)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300, check=True)
