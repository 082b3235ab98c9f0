"""Times all-reduces, and then asks for what cannot be timed.

    mpirun -np 2 python allreduce_job.py FOLDER BACKEND 2

Writes FOLDER/points.json, and what each process was told to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.identity import identify
from tfdist.errors import TfdistError
from tfdist.evidence.allreduce_program import SIZES, main

FOLDER, BACKEND, REPLICAS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def error(backend: str, replicas: int, sizes: Sequence[int] = SIZES) -> str:
    try:
        main(FOLDER / "wrong.json", backend, replicas, sizes)
    except TfdistError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    main(FOLDER / "points.json", BACKEND, REPLICAS, [1024, 1 << 18])
    errors = [error(BACKEND, REPLICAS + 1), error(BACKEND, REPLICAS, [6]), error("parameter_server", REPLICAS)]
    (FOLDER / f"{identify().rank}.json").write_text(json.dumps(errors))
