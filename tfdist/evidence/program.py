"""One process of `tfdist check`: runs cases on one backend and writes what they gave.

    python -m tfdist.evidence.program FOLDER BACKEND REPLICAS CASES       REPLICAS and CASES: separated by commas

Each line of FOLDER/BACKEND-REPLICAS-RANK.jsonl is one case: its name, and its value or the error. Backends of one
process do several numbers of replicas in one process; under mpirun the launcher gives the number.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tfdist.cluster.causes import cause_of
from tfdist.cluster.identity import identify
from tfdist.errors import TfdistError
from tfdist.evidence.cases import CASES, Run

__all__ = ["main"]


def main(folder: Path, backend: str, replicas: list[int], names: list[str]) -> None:
    """Run the cases, the largest number of replicas first: logical devices cannot become more later."""
    rank = identify().rank
    for count in sorted(replicas, reverse=True):
        with (folder / f"{backend}-{count}-{rank}.jsonl").open("w") as file:
            for name in (name for name in names if CASES[name].applies(backend, count)):
                result: dict[str, Any] = {"case": name}
                start = time.monotonic()
                try:
                    result["value"] = CASES[name].run(Run(backend, count))
                except TfdistError as error:  # every rank raises it, so that all go on
                    result["error"] = str(error)
                except Exception as error:
                    result["error"] = cause_of(error)
                    raise
                finally:
                    print(json.dumps(result | {"seconds": time.monotonic() - start}), file=file, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(n) for n in sys.argv[3].split(",")], sys.argv[4].split(","))
