"""Runs that nobody would want for themselves, to measure others by.

    python -m tfdist.evidence.variant FILE            or under mpirun; FILE is JSON:
    {"task": …, "task_args": […], "settings": {…}, "report": FILE, "perturb": 1e-5, "alone": false}

`perturb` changes each weight by that share of itself, up or down, before the first step: what rounding of that size
makes of a run. `alone` lets each replica train by itself, without communication (what comes out means nothing, but its
time does): the same steps on the same cores.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.config import Settings
from tfdist.strategies.session import open_session
from tfdist.strategies.table import BACKENDS

__all__ = ["main"]


def main(file: Path) -> None:
    """Run what the file says."""
    given = json.loads(file.read_text())
    settings: dict[str, Any] = given["settings"]
    if given["alone"]:
        backend = settings["backend"]
        BACKENDS[backend] = dataclasses.replace(BACKENDS[backend], own_copies=True)
        settings |= {"sync_every": settings["steps"], "steps_per_chunk": settings["steps"], "check_every": 0}
    open_session(settings["backend"], Settings.of(**settings).options)

    from tfdist.tasks.load import load_task
    from tfdist.training import report
    from tfdist.training.trainer import Trainer

    trainer = Trainer(load_task(given["task"], given["task_args"]), **settings)
    for number, variable in enumerate(trainer.model.trainable_variables if given["perturb"] else ()):
        value = variable.numpy()
        signs = np.random.default_rng(number).choice([-1.0, 1.0], value.shape)
        variable.assign((value * (1.0 + given["perturb"] * signs)).astype(value.dtype))
    result = trainer.fit()
    if trainer.session.is_chief:
        report.write(result, Path(given["report"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
