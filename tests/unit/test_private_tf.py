"""What tfdist uses of TensorFlow without a promise from TensorFlow, all of it in tfdist/private_tf.py."""

from __future__ import annotations

import ast
import importlib
import types
from pathlib import Path

import pytest
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tfdist" / "private_tf.py"


def test_every_private_name_is_where_it_was():
    moved = []
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorflow.python"):
            for alias in node.names:
                try:
                    found = hasattr(importlib.import_module(node.module), alias.name)
                except ImportError:
                    found = False
                if not found:
                    moved.append(f"{node.module}.{alias.name}")
    assert not moved, f"TensorFlow {tf.__version__} has moved: {', '.join(moved)}. Adapt tfdist/private_tf.py."


def test_every_name_that_is_overridden_or_used_still_exists():
    from tfdist.private_tf import HOOKS

    def has(owner, name):
        """As a method, or as something that instances get when they are made."""
        return hasattr(owner, name) or name in owner.__init__.__code__.co_names

    moved = [f"{cls.__name__}.{name}" for cls, names in HOOKS.items() for name in names if not has(cls, name)]
    assert not moved, f"TensorFlow {tf.__version__} has no {', '.join(moved)}. Adapt hvd_backend and tfdist/as_one."


def test_a_hook_that_is_nowhere_is_named(monkeypatch):
    from tfdist import private_tf

    monkeypatch.setitem(private_tf.HOOKS, private_tf.RemoteValueImpl, ("_status_available", "_set_error"))
    with pytest.raises(AssertionError, match=r"has no RemoteValueImpl\._status_available\. Adapt"):
        test_every_name_that_is_overridden_or_used_still_exists()


def test_names_count_within_the_function_and_its_control_flow():
    from tfdist.private_tf import name_in_function

    names = []

    def note():
        names.append(name_in_function("reduce"))
        return 1

    @tf.function
    def step(flag):
        note()
        tf.cond(flag, note, note)
        tf.while_loop(lambda i: i < 2, lambda i: [i + note()], [0])
        inner(flag)
        note()

    @tf.function
    def inner(flag):
        note()

    step(tf.constant(True))
    function = [name for name in names if name.startswith("step.")]
    assert function == [f"step.reduce.{i}" for i in range(5)]
    assert [name for name in names if name.startswith("inner.")] == ["inner.reduce.0"]


def test_xla_is_noticed():
    from tfdist.private_tf import in_xla

    seen = []

    def note(x):
        seen.append(in_xla())
        return x

    tf.function(note).get_concrete_function(tf.constant(1.0))
    tf.function(note, jit_compile=True).get_concrete_function(tf.constant(1.0))
    assert seen == [False, True]


def test_datasets_on_devices_are_tuned_again_afterwards():
    from tfdist.private_tf import multi_device_iterator_ops, untuned_device_datasets

    original = multi_device_iterator_ops._create_device_dataset
    with untuned_device_datasets():
        assert multi_device_iterator_ops._create_device_dataset is not original
    assert multi_device_iterator_ops._create_device_dataset is original
    with pytest.raises(ValueError, match="falling"), untuned_device_datasets():
        raise ValueError("the sky is falling")
    assert multi_device_iterator_ops._create_device_dataset is original


def test_datasets_on_devices_are_not_tuned_inside(monkeypatch):
    from tfdist.private_tf import multi_device_iterator_ops, untuned_device_datasets

    given = []

    def create(*arguments):
        given.append(arguments)
        return tf.data.Dataset.range(3)

    monkeypatch.setattr(multi_device_iterator_ops, "_create_device_dataset", create)
    with untuned_device_datasets():
        made = multi_device_iterator_ops._create_device_dataset("prototype", 1)
    assert given == [("prototype", 1)]
    assert made.options().autotune.enabled is False
    assert list(made.as_numpy_iterator()) == [0, 1, 2]


def test_private_names_are_nowhere_else():
    files = [path for package in ("tfdist", "hvd_backend") for path in (ROOT / package).rglob("*.py")]
    assert files
    others = [str(path.relative_to(ROOT)) for path in files if path != FILE and "tensorflow.python" in path.read_text()]
    assert not others


def test_a_multi_worker_strategy_gets_its_devices_while_it_is_made():
    from tfdist.private_tf import CollectiveAllReduceExtended, local_cpu_devices

    name = "_initialize_local_devices"
    original = getattr(CollectiveAllReduceExtended, name)
    with local_cpu_devices(1):
        assert getattr(CollectiveAllReduceExtended, name) is original
    with local_cpu_devices(2):
        devices, kind = getattr(CollectiveAllReduceExtended, name)(None, None, "/job:worker/task:1")
    assert (devices, kind) == (("/job:worker/task:1/device:CPU:0", "/job:worker/task:1/device:CPU:1"), "CPU")
    assert getattr(CollectiveAllReduceExtended, name) is original
    with pytest.raises(ValueError, match="falling"), local_cpu_devices(2):
        raise ValueError("the sky is falling")
    assert getattr(CollectiveAllReduceExtended, name) is original


def test_the_operations_of_a_pipeline_are_those_of_its_functions_too():
    from tfdist.private_tf import operations

    plain = tf.data.Dataset.from_tensor_slices(["PyFunc"])
    assert "PyFunc" not in operations(plain.map(lambda text: text + "PyFunc"))
    assert "PyFunc" in operations(plain.map(lambda text: tf.numpy_function(lambda t: t, [text], tf.string)))


def test_the_result_of_a_worker_is_waited_for_only_so_long():
    from tfdist.private_tf import RemoteValueImpl, wait_for

    result = RemoteValueImpl(None, tf.TensorSpec([], tf.int64))
    assert not wait_for(result, 0.0)
    result._set_error(ValueError("falling"))
    assert wait_for(result, 0.0)


def test_tensorflow_does_not_warn_while_a_function_for_workers_is_traced():
    from tfdist.private_tf import traced_for_workers

    extended = types.SimpleNamespace(_allow_run_without_coordinator=False)
    strategy = types.SimpleNamespace(extended=extended)
    with traced_for_workers(strategy):
        assert extended._allow_run_without_coordinator is True
    with pytest.raises(ValueError, match="falling"), traced_for_workers(strategy):
        raise ValueError("the sky is falling")
    assert extended._allow_run_without_coordinator is False
