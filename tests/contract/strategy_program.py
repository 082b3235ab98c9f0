"""One set of checks of the `tf.distribute` contract, run unchanged on every strategy. Started by test_strategy_*.py.

    python strategy_program.py OUT mirrored          # two logical devices
    mpirun -np 2 python strategy_program.py OUT horovod | multi_worker_mirrored

Every rank writes OUT/rank.json: for each check what it saw, or the error that it met. `mine` marks a list of
what the replicas of this process saw, in order; everything else must be equal on all ranks.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

import tensorflow as tf

from tfdist.cluster import runtime
from tfdist.cluster.identity import identify
from tfdist.strategies.session import open_session
from tfdist.strategies.table import Options

kind = sys.argv[2]
rank = identify().rank
if kind == "mirrored":
    # TensorFlow's own, with its own collectives: the measure for the others.
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    tf.config.threading.set_intra_op_parallelism_threads(runtime.intra_op_threads(identify(), 2))
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
else:
    strategy = open_session(kind, Options()).strategy

Path(sys.argv[1], "files").mkdir(exist_ok=True)

from tests.contract import strategy_checks, strategy_keras  # noqa: E402


def plain(value):
    """What JSON can hold; float16 and bfloat16 as floats, complex numbers as text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, tf.IndexedSlices):
        return {"slices": plain(value.values), "indices": plain(value.indices)}
    if hasattr(value, "numpy"):
        array = value.numpy()
        if isinstance(array, bytes):
            return array.decode()
        dtype = tf.as_dtype(value.dtype)
        if dtype.is_complex or dtype == tf.string:
            return [dtype.name, str(array.tolist())]
        if dtype in (tf.bfloat16, tf.float16):
            array = array.astype("float32")
        return [dtype.name, array.tolist()]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def main() -> None:
    results = {}
    only = sys.argv[3:]
    for module in (strategy_checks, strategy_keras):
        for name, check in vars(module).items():
            if not name.startswith("check_") or (only and name.removeprefix("check_") not in only):
                continue
            start = time.monotonic()
            try:
                for part, value in check(strategy):
                    results[f"{name.removeprefix('check_')}: {part}"] = plain(value)
            except Exception as error:  # an error is a result too: is it the same one on every strategy?
                results[name.removeprefix("check_")] = {
                    "error": type(error).__name__,
                    "text": str(error)[:300],
                }
                print(name, traceback.format_exc(), file=sys.stderr, flush=True)
            print(f"[{rank}] {kind} {name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    out = Path(sys.argv[1])
    (out / f"{rank}.json").write_text(json.dumps(results, default=str))


main()
