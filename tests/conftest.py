"""`--full`, which tests what is expensive and rarely informative too; and the order of the files."""

from __future__ import annotations

import os

import pytest

from tests.full import VARIABLE

LONGEST = [
    "contract/test_right_values.py",
    "contract/test_strategy_contract.py",
    "contract/test_command.py",
    "contract/test_faults.py",
    "contract/test_resume.py",
    "hosts/test_hosts.py",
    "contract/test_strategy_jobs.py",
    "contract/test_launch_command.py",
    "faults/test_chaos.py",
    "hosts/test_slurm.py",
]
"""pytest-xdist gives files to its workers in this order, so that both are done at about the same time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests that are marked as full")


def pytest_configure(config: pytest.Config) -> None:
    # Before test files are imported: they choose by it what to parametrize over, and jobs inherit it.
    os.environ[VARIABLE] = "1" if config.getoption("full") else "0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("full")]
    items.sort(key=lambda item: place(item.nodeid))


def place(nodeid: str) -> int:
    """The place of a test's file among the longest, and after them for any other."""
    file = nodeid.partition("::")[0]
    return next((i for i, name in enumerate(LONGEST) if file.endswith(name)), len(LONGEST))
