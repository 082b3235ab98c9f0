"""Horovod as a backend of tfdist: how Horovod is built, started and used as a tf.distribute strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_backend.strategy import HorovodStrategy

__all__ = ["HorovodStrategy"]


def __getattr__(name: str) -> Any:
    # Importing hvd_backend must not import TensorFlow: `python -m hvd_backend.build` runs where there is none
    # yet.
    if name == "HorovodStrategy":
        from hvd_backend.strategy import HorovodStrategy

        return HorovodStrategy
    raise AttributeError(f"module 'hvd_backend' has no attribute {name!r}")
