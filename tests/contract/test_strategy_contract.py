"""One set of checks on MirroredStrategy, tfdist's MultiWorkerMirrored and HorovodStrategy, two replicas each.

What MirroredStrategy gives is what the others must give, bit for bit, but for what is listed here with its
reason. Each strategy's processes are started once (strategy_program.py), and every check is a test on what
they wrote.
"""

from __future__ import annotations

import ast
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.full import full
from tests.jobs import once_more_if_tensorflow_crashed, run_alone, run_mpi

HERE = Path(__file__).parent
NUMBERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64", "complex128"]
PROGRAM = HERE / "strategy_program.py"
SECONDS = 2400 if full() else 1200
"""The longest job takes about 100 on an idle machine."""
CHECKS = [
    node.name.removeprefix("check_")
    for file in ("strategy_checks.py", "strategy_keras.py")
    for node in ast.parse((HERE / file).read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]

# In several processes a value differs by nature from that in one: what TensorFlow's own multi-process
# strategy gives is the measure here.
AS_MULTI_WORKER = (
    r"datasets: OFF",  # every process reads the whole dataset
    r"file_datasets",  # every process reads its own files
    r"dataset_functions: (context|steps)",  # one pipeline per process
    r"ON_WRITE NONE .* (outside|numpy)",  # never combined: a process sees its own
    r"Python number",  # one process sees one object on both replicas
    r"run: local results of nested",
    r"merge_call: update no group",
)
# Horovod gives a value where TensorFlow's own strategies overflow or fail. The values are tested below.
BEYOND = {
    r"all_reduce_large: float16": "MirroredStrategy adds 40000 + 40000 in half precision: infinite",
    r"overflow": "MirroredStrategy asks the first replica only, and sets weights to infinity for the second",
    r"uneven_fit": "Keras builds a model from the sum of the first batch's parts, which have different sizes",
    r"nested_functions": "MirroredStrategy takes no all_reduce inside a tf.function inside run",
    r"steps_per_execution": "native collectives lose a captured key in a nested loop",
}
ONLY_BEYOND = ("overflow", "uneven_fit", "nested_functions", "steps_per_execution")
"""Checks whose values on MirroredStrategy are compared with nothing."""
# Allowed to differ in the last bits, and by how much.
CLOSE = {
    r"reduce: (uneven|matrix) MEAN .*graph": 1e-6,  # in one graph the division by a constant becomes a product
    r"layers: embedding": 1e-6,  # equal rows are added in another order
}
KERAS = ["guide", "fit", "fit_shuffled", "fit_options", "layers", "metrics", "gan", "callbacks", "schedule"]
"""Programs with Keras whose values on multi_worker_mirrored are compared with those on MirroredStrategy."""
ON_MULTI_WORKER = ["guide", "fit", "fit_shuffled", "metrics", "gan"]
"""Those of them that run without `--full`."""
MEASURES = ["datasets", "file_datasets", "dataset_functions", "variables", "run", "merge_call"]
"""Checks with values in which multi_worker_mirrored is the measure: see AS_MULTI_WORKER."""
# TensorFlow's collectives stay broken after an error in one, so checks that fail natively are not asked of it.
NOT_NATIVE = ("nested_functions", "steps_per_execution", "reduce_variables", "dataset_per_replica")
ASKED = [
    name
    for name in CHECKS
    if name in (*ON_MULTI_WORKER, *MEASURES, "overflow", "uneven_fit", "rows") or (full() and name not in NOT_NATIVE)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By strategy and check: what all its replicas saw."""
    out = {name: tmp_path_factory.mktemp(name) for name in ("mirrored", "horovod", "multi_worker_mirrored")}
    native = [name for name in CHECKS if name not in ONLY_BEYOND]
    with ThreadPoolExecutor(2) as pool:  # side by side: each leaves the processors idle at times
        starts = [
            lambda: run_mpi(2, PROGRAM, out["horovod"], "horovod", timeout=SECONDS),
            lambda: run_alone(PROGRAM, out["mirrored"], "mirrored", *native, timeout=SECONDS),
            lambda: run_mpi(2, PROGRAM, out["multi_worker_mirrored"], "multi_worker_mirrored", *ASKED, timeout=SECONDS),
        ]
        jobs = [pool.submit(once_more_if_tensorflow_crashed, start) for start in starts]
        for job in jobs:
            job.result().check()
    return {
        name: merged([json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))])
        for name, folder in out.items()
    }


def merged(ranks):
    """The results of all ranks as one: `mine` joined in the order of the ranks, all else equal on all ranks."""
    first = ranks[0]
    if isinstance(first, dict) and all(isinstance(rank, dict) for rank in ranks):
        if all("error" in rank for rank in ranks):
            return {"error": first["error"]}
        if list(first) == ["mine"]:
            return {"replicas": [value for rank in ranks for value in rank["mine"]]}
        if all(rank.keys() == first.keys() for rank in ranks):
            return {key: merged([rank[key] for rank in ranks]) for key in first}
    if isinstance(first, list) and all(isinstance(rank, list) and len(rank) == len(first) for rank in ranks):
        return [merged([rank[i] for rank in ranks]) for i in range(len(first))]
    return first if all(rank == first for rank in ranks) else {"differ": ranks}


def parts_of(results, strategy, name):
    parts = {key: value for key, value in results[strategy].items() if key.split(":")[0] == name}
    assert parts, f"{strategy} has no results of {name}"
    return parts


def matching(patterns, key):
    return next((pattern for pattern in patterns if re.search(pattern, key)), None)


def close(a, b, tolerance):
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    return a == b


def compare(key, expected, got):
    """None if `got` is right, else what is wrong."""
    if isinstance(expected, dict) and "error" in expected:
        return None  # nothing to hold it to: the native strategy has no value
    tolerance = CLOSE.get(matching(CLOSE, key) or "", 0.0)
    same = close(expected, got, tolerance) if tolerance else expected == got
    return None if same else f"{key}\n    expected {str(expected)[:300]}\n    got      {str(got)[:300]}"


@pytest.mark.timeout(6 * SECONDS)
@pytest.mark.parametrize("name", CHECKS)
def test_horovod_gives_what_mirrored_gives(results, name):
    native = {} if name in ONLY_BEYOND else parts_of(results, "mirrored", name)
    several = {key: value for key, value in results["multi_worker_mirrored"].items() if key.split(":")[0] == name}
    wrong = []
    for key, got in parts_of(results, "horovod", name).items():
        if matching(BEYOND, key):
            assert not (isinstance(got, dict) and "error" in got), (key, got)
            continue
        expected = several if matching(AS_MULTI_WORKER, key) else native
        assert key in expected, f"no native result for {key}"
        wrong.append(compare(key, expected[key], got))
    wrong = [problem for problem in wrong if problem]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(6 * SECONDS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ON_MULTI_WORKER else pytest.mark.full) for n in KERAS]
)
def test_keras_on_multi_worker_mirrored_gives_what_mirrored_gives(results, name):
    native = parts_of(results, "mirrored", name)
    problems = [compare(key, native[key], got) for key, got in parts_of(results, "multi_worker_mirrored", name).items()]
    assert not [problem for problem in problems if problem], problems


@pytest.mark.timeout(6 * SECONDS)
def test_values_that_only_horovod_has(results):
    horovod = results["horovod"]
    for way in ("eager", "graph"):
        traced = [d for d in NUMBERS if way == "eager" or f"all_reduce: {d} SUM graph" in horovod]
        assert {"int32", "int64", "complex64"} <= set(traced)
        for dtype in ("float16", "bfloat16"):
            half = horovod[f"all_reduce_large: {dtype} {way}"]["replicas"]
            assert half[0] == half[1]
            assert abs(half[0][1][0] - 40000) <= 64  # bfloat16 has 8 bits
        for dtype in [name for name in traced if "int" in name]:
            assert horovod[f"all_reduce: {dtype} SUM {way}"]["replicas"] == [[dtype, [3, 6]]] * 2
            means = horovod[f"all_reduce: {dtype} MEAN {way}"]["replicas"]
            assert [values for _, values in means] == [[1.5, 3.0]] * 2
        for dtype in [name for name in traced if "complex" in name]:
            assert horovod[f"all_reduce: {dtype} SUM {way}"]["replicas"] == [[dtype, "[(3+0j), (6+0j)]"]] * 2
        assert horovod[f"all_reduce: bool SUM {way}"] == {"error": "TypeError"}
        assert horovod[f"all_gather: bool {way}"]["replicas"] == [["bool", [True, False, True, False]]] * 2
    assert horovod["nested_functions: run of a function"]["replicas"] == [["float32", [10.0, 10.0]]] * 2
    for strategy in ("horovod", "multi_worker_mirrored"):
        for replica in (0, 1):  # the step is skipped on both, and the scale halved; the next one counts
            skipped = [[[[1.0]], [0.0]], ["float32", 16384.0], ["int64", 0]]
            assert results[strategy][f"overflow: on {replica}"] == skipped
            after = [[[[0.9800000190734863]], [-0.019999999552965164]], ["float32", 16384.0], ["int64", 1]]
            assert results[strategy][f"overflow: after {replica}"] == after
        uneven = {key: value for key, value in results[strategy].items() if key.startswith("uneven_fit")}
        assert len(uneven) == (6 if full() else 3)
        assert all(uneven.values()), uneven
        for data in ("arrays", "dataset"):
            assert results[strategy][f"rows: {data}"] == [sum(range(64))] * 3
    step_by_step = horovod["steps_per_execution: the same step by step"]
    assert horovod["steps_per_execution: steps per execution"] == step_by_step


@pytest.mark.timeout(6 * SECONDS)
def test_all_ranks_read_the_same(results):
    """A variable that the replicas write for themselves is combined when it is read outside of them."""
    horovod = results["horovod"]
    for key in horovod:
        if key.startswith("variables: ON_READ") and key.endswith(("read outside", "numpy")):
            assert "differ" not in str(horovod[key]), (key, horovod[key])
