"""Prints and saves as a job under `tfdist launch` does, and trains nothing: chaos_job.py FOLDER honest|forgets|fails.

honest   goes on from the newest checkpoint whenever one of its two processes is killed
forgets  begins anew then
fails    starts again by itself once, too
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER, MODE = Path(sys.argv[1]) / "checkpoints", sys.argv[2]
STEPS, EVERY = 200, 20


def start() -> list[subprocess.Popen[bytes]]:
    workers, sleep = ["localhost:1", "localhost:2"], [sys.executable, "-c", "import time; time.sleep(60)"]
    places = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(2)]
    return [subprocess.Popen(sleep, env={**os.environ, "TF_CONFIG": json.dumps(place)}) for place in places]


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()


FOLDER.mkdir(exist_ok=True)
starts, done = 0, False
while not done:
    starts, ranks = starts + 1, start()
    print("[worker 0] training on horovod, 2 replicas: 200 steps", flush=True)
    saved = max((int(path.name[5:]) for path in FOLDER.iterdir()), default=0)
    step = 0 if MODE == "forgets" else saved
    if saved:
        print(f"[worker 0] resumed from here: {step} of {STEPS} steps are done", flush=True)
    while step < STEPS and all(rank.poll() is None for rank in ranks):
        if MODE == "fails" and starts == 1 and step == 100:
            break
        time.sleep(0.006)
        step += 1
        if step % EVERY == 0:
            (FOLDER / f"step-{step:09d}").mkdir(exist_ok=True)
    done = step == STEPS
    end(ranks)
    if not done:
        print(f"tfdist: rank 1 has died after step {step}", flush=True)
        print("tfdist: worker 1 failed first: killed. All start again in 0 s: start 2 of 9.", flush=True)
