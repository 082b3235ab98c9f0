"""Virtual shards: how a batch is cut, and the order in which sums are taken."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.toy import ToyLine
from tests.unit.launched import environment
from tests.unit.one_device import STRATEGY, trainer
from tfdist import Settings, UsageError
from tfdist.training.data import _piece
from tfdist.training.shards import for_each_shard, rows_between, sum_in_a_tree


@pytest.mark.parametrize(("rows", "shards"), [(16, 8), (37, 8), (5, 8), (0, 8), (7, 12), (9, 1)])
def test_shards_are_cut_the_same_at_every_number_of_replicas(rows: int, shards: int) -> None:
    cuts = []
    for replicas in (n for n in range(1, shards + 1) if shards % n == 0):
        found = []
        for replica in range(replicas):
            piece, ends = _piece((tf.range(rows),), replica, replicas, shards)
            assert ends.shape == [shards // replicas + 1]
            found += [rows_between(piece[0], a, b).numpy().tolist() for a, b in itertools.pairwise(ends)]
        cuts.append(found)
    assert all(cut == cuts[0] for cut in cuts)
    sizes = [len(shard) for shard in cuts[0]]
    assert list(itertools.chain(*cuts[0])) == list(range(rows))
    assert max(sizes) - min(sizes) <= 1


def in_a_tree(values: Any) -> Any:
    """What the order of the tree gives for one number of each shard, in float32."""
    nodes = [np.float32(v) for v in values]
    while len(nodes) > 1:
        pairs = [a + b for a, b in zip(nodes[0::2], nodes[1::2], strict=False)]
        nodes = pairs + nodes[len(nodes) - len(nodes) % 2 :]
    return nodes[0]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 12])
def test_sums_are_taken_in_the_order_of_the_tree(count: int) -> None:
    # Numbers of many sizes, so that another order gives other bits.
    random = np.random.RandomState(count)
    values = (random.randn(count, 3, 50) * 10.0 ** random.randint(-4, 5, [count, 3, 50])).astype(np.float32)
    run = tf.function(lambda: STRATEGY.run(sum_in_a_tree, args=([tf.constant(values), tf.range(count)],)))
    total, numbers = run()
    assert total.numpy().tolist() == in_a_tree(values).tolist()
    assert int(numbers) == count * (count - 1) // 2
    if count > 2:
        assert np.any(in_a_tree(values) != in_a_tree(values[np.roll(np.arange(count), 1)]))


def test_a_function_of_each_shard() -> None:
    batch, ends = tf.constant([[1.0], [2.0], [3.0]]), tf.constant([0, 2, 2, 3], tf.int64)
    sums, numbers = tf.function(
        lambda: for_each_shard(lambda shard, rows: (tf.reduce_sum(rows, 0), shard), batch, ends)
    )()
    assert sums.numpy().tolist() == [[3.0], [0.0], [3.0]]
    assert numbers.numpy().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "settings",
    [{"compression": "float16"}, {"sparse": "gather"}, {"lr_scaling": "linear"}, {"batch_norm": "sync"}],
)
def test_what_would_depend_on_the_number_of_replicas_is_refused(settings: Any) -> None:
    with pytest.raises(UsageError, match=f"(?s)reproducible.*{next(iter(settings))}"):
        Settings.of(reproducible=True, **settings)


def test_virtual_shards_alone_have_no_effect() -> None:
    with pytest.raises(UsageError, match="virtual_shards=4 has no effect without reproducible"):
        Settings.of(virtual_shards=4)


def test_reproducible_training_is_training() -> None:
    # w = 1, mean label 1.5, as in `ToyLine`: a step moves w by 0.2·(1.5 - w); four rows in eight shards.
    report = trainer(ToyLine(), reproducible=True, steps=2).fit()
    assert report.losses == pytest.approx([1.5, 1.25 + 0.4**2], rel=1e-6)
    assert report.examples_seen == 8


DETERMINISTIC = """
import tensorflow as tf
tf.config.experimental.enable_op_determinism()
from tests.toy import ToyNet
from tests.unit.one_device import trainer
report = trainer(ToyNet(), reproducible=True, steps=3).fit()
assert 0 < report.step_time_ms.median < 60_000, report.step_time_ms
assert 0 < report.ranks[0]["compute_seconds"] < 60, report.ranks
print(report.state_sha256)
"""


def test_operations_may_be_deterministic() -> None:
    """TensorFlow's own clock then fails, and so it does where the user has asked for that."""
    run = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC], capture_output=True, text=True, timeout=300, env=environment(None)
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.strip()) == 64
