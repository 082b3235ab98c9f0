"""How much is tested: what every change needs, or all (`pytest --full`, which `make test-full` runs)."""

from __future__ import annotations

import os

VARIABLE = "TFDIST_TEST_FULL"
"""The environment variable by which the processes of jobs know."""


def full() -> bool:
    """Whether all is tested."""
    return os.environ.get(VARIABLE) == "1"
