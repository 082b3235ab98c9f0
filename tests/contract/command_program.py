"""Runs the command line several times in one process: starting TensorFlow is what takes time.

    python command_program.py FOLDER '[["train", "--steps", "0"], …]'        alone or under mpirun

Each process writes what every command printed and ended with to FOLDER/RANK.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from tfdist.cli import main
from tfdist.cluster.identity import identify


def run(arguments: list[str]) -> list[str | int]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(arguments)
    return [code, printed.getvalue()]


if __name__ == "__main__":
    results = [run(arguments) for arguments in json.loads(sys.argv[2])]
    (Path(sys.argv[1]) / f"{identify().rank}.json").write_text(json.dumps(results))
