"""`manifest.json` of a checkpoint: what was saved, in which files, with their checksums.

It is written last and read strictly: whatever is not exactly as `Manifest.to_bytes` writes it is damage.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import CheckpointProblem

__all__ = ["DATA", "INDEX", "NAME", "FileInfo", "Manifest", "TensorInfo", "encoded", "file_info"]

NAME = "manifest.json"
INDEX = "variables.index"
DATA = "variables.data-00000-of-00001"

_SCHEMA = 1
_MOST_BYTES = 64 * 2**20
_NOT_FINITE = "$float"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIGNED = re.compile(rb'\{\n "checksum": "([0-9a-f]{64})",(\n.*)', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a tensor is like, without its values."""

    shape: tuple[int, ...]
    dtype: str
    """NumPy's and TensorFlow's name of it: float32, bfloat16, bool, …"""

    @classmethod
    def of(cls, tensor: np.ndarray) -> TensorInfo:
        """Of an array."""
        return cls(tuple(tensor.shape), tensor.dtype.name)


@dataclasses.dataclass(frozen=True)
class FileInfo:
    """What a file must be like."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What stands in `manifest.json`."""

    step: int
    created: str
    """UTC, ISO 8601."""
    tfdist: str
    """The version that wrote it."""
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo]
    state: dict[str, Any]
    """JSON of the trainer's. Floats may be infinite or NaN; tuples come back as lists, NumPy's numbers as Python's."""
    score: float | None = None
    """Of the evaluation at this step, where the best checkpoint is kept."""

    def to_bytes(self) -> bytes:
        """The file. The same manifest always gives the same bytes.

        Raises:
            CheckpointProblem: the state holds what JSON does not know, or is too large to be read again.
        """
        tensors = {name: vars(info) for name, info in self.tensors.items()}
        files = {name: vars(info) for name, info in self.files.items()}
        fields = encoded({**vars(self), "tensors": tensors, "files": files}, "")
        body = json.dumps({**fields, "schema": _SCHEMA}, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
        checksum = hashlib.sha256(body).hexdigest().encode()
        text = b'{\n "checksum": "' + checksum + b'",' + body[1:]
        if len(text) > _MOST_BYTES:
            raise CheckpointProblem(f"state would make {NAME} {len(text)} bytes long, and {_MOST_BYTES} is the limit.")
        return text

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """From the file.

        Raises:
            CheckpointProblem: what is wrong with it.
        """
        signed = _SIGNED.fullmatch(text)
        if signed is None:
            raise CheckpointProblem(f"{NAME} is damaged: it does not begin with its checksum")
        body = b"{" + signed[2]
        if hashlib.sha256(body).hexdigest().encode() != signed[1]:
            raise CheckpointProblem(f"{NAME} is damaged: its checksum is wrong")
        try:
            value = json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise CheckpointProblem(f"{NAME} is not valid JSON: {error}") from None
        if isinstance(value, dict) and value.get("schema") != _SCHEMA:
            raise CheckpointProblem(
                f"{NAME} has schema={value.get('schema')!r}, and this tfdist reads schema {_SCHEMA}. "
                "Use the version of tfdist that wrote it"
            )
        return _manifest(value)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Of the checkpoint in a folder.

        Raises:
            CheckpointProblem: there is none, or what is wrong with it.
        """
        path = folder / NAME
        try:
            if path.is_symlink() or not path.is_file():
                raise CheckpointProblem(f"{NAME} is {'not a file' if path.exists() else 'missing'}")
            with path.open("rb") as file:
                text = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise CheckpointProblem(f"{NAME} cannot be read: {error.strerror or error}") from None
        if len(text) > _MOST_BYTES:
            raise CheckpointProblem(f"{NAME} is larger than {_MOST_BYTES} bytes, which no manifest is")
        return cls.from_bytes(text)


def file_info(path: Path) -> FileInfo:
    """What a file is like now, read from the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileInfo(file.tell(), digest)


def encoded(value: Any, where: str = "") -> Any:
    """What JSON can hold; a float that is not finite becomes {"$float": "nan"}, "inf" or "-inf".

    Raises:
        CheckpointProblem: it cannot hold it; `where` is the path of the value in the message.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NOT_FINITE: repr(value)}
    if isinstance(value, list | tuple):
        return [encoded(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _NOT_FINITE:
                raise CheckpointProblem(f"{where}[{key!r}] cannot be saved: it must have another name, made of text.")
        return {key: encoded(item, f"{where}.{key}" if where else key) for key, item in value.items()}
    raise CheckpointProblem(f"{where} cannot be saved: JSON does not know the type {type(value).__name__}.")


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_NOT_FINITE} and value[_NOT_FINITE] in ("nan", "inf", "-inf"):
            return float(value[_NOT_FINITE])
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return dict(pairs)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _manifest(value: Any) -> Manifest:
    names = [field.name for field in dataclasses.fields(Manifest)]
    fields = _object(value, "the whole", (*names, "schema"))
    step = _natural(fields["step"], "step")
    created, tfdist = _text(fields["created"], "created"), _text(fields["tfdist"], "tfdist")
    try:
        datetime.datetime.fromisoformat(created)
    except ValueError:
        raise _wrong("created", "a time in ISO 8601", created) from None
    tensors = {name: _tensor(item, f"tensors.{name}") for name, item in _object(fields["tensors"], "tensors").items()}
    files = {}
    for name, item in _object(fields["files"], "files").items():
        # Names are joined to the checkpoint's folder, and must not lead out of it.
        if not _PLAIN_NAME.fullmatch(name) or name == NAME:
            raise CheckpointProblem(f"{NAME} names the file {name!r}, which cannot be one of a checkpoint")
        files[name] = _file(item, f"files.{name}")
    for name in (INDEX, DATA):
        if name not in files:
            raise CheckpointProblem(f"{NAME} does not name the file {name}")
    score = _decoded(fields["score"])
    if score is not None and not isinstance(score, float):
        raise _wrong("score", "a float or null", score)
    return Manifest(step, created, tfdist, tensors, files, _decoded(_object(fields["state"], "state")), score)


def _tensor(value: Any, where: str) -> TensorInfo:
    fields = _object(value, where, ("shape", "dtype"))
    if not isinstance(fields["shape"], list):
        raise _wrong(f"{where}.shape", "a list", fields["shape"])
    shape = tuple(_natural(size, f"{where}.shape") for size in fields["shape"])
    return TensorInfo(shape, _text(fields["dtype"], f"{where}.dtype"))


def _file(value: Any, where: str) -> FileInfo:
    fields = _object(value, where, ("bytes", "sha256"))
    sha256 = _text(fields["sha256"], f"{where}.sha256")
    if not _SHA256.fullmatch(sha256):
        raise _wrong(f"{where}.sha256", "64 hexadecimal digits", sha256)
    return FileInfo(_natural(fields["bytes"], f"{where}.bytes"), sha256)


def _object(value: Any, where: str, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    if names is not None and set(value) != set(names):
        missing, unknown = sorted(set(names) - set(value)), sorted(set(value) - set(names))
        what = f"lacks {', '.join(missing)}" if missing else f"has the unknown {', '.join(unknown)}"
        raise CheckpointProblem(f"{NAME}: {where} {what}")
    return value


def _natural(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise _wrong(where, "a whole number, 0 or more", value)
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "text", value)
    return value


def _wrong(where: str, right: str, value: Any) -> CheckpointProblem:
    return CheckpointProblem(f"{NAME}: {where} must be {right}, and is {repr(value)[:60]}")
