"""The only file of tfdist with private TensorFlow names: what each is, and why nothing public does.

`HorovodStrategy` is TensorFlow's own multi-worker strategy with other collectives. That keeps everything that programs
see (variable classes, checkpoints, dataset sharding, replica contexts) TensorFlow's, and is why a few names below are
private. `as_one` replaces others at run time. `tests/unit/test_private_tf.py` names any that a new TensorFlow moves.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl.api import tf_convert
from tensorflow.python.checkpoint.functional_saver import MultiDeviceSaver
from tensorflow.python.data.ops import multi_device_iterator_ops, random_op
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset as ShuffleDataset
from tensorflow.python.data.util import random_seed as data_random_seed
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.coordinator.values import RemoteValueImpl
from tensorflow.python.distribute.cross_device_ops import simple_broadcast
from tensorflow.python.distribute.device_util import canonicalize
from tensorflow.python.distribute.distribute_utils import is_mirrored, regroup, select_replica
from tensorflow.python.distribute.input_lib import DistributedDataset
from tensorflow.python.distribute.parameter_server_strategy_v2 import ParameterServerStrategyV2Extended
from tensorflow.python.distribute.values import SyncOnReadVariable
from tensorflow.python.distribute.values_util import mark_as_unsaveable
from tensorflow.python.eager.context import Context
from tensorflow.python.framework import ops, random_seed
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops import gen_random_ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.saved_model import save as saved_model_save
from tensorflow.python.trackable.base import CheckpointInitialValue

__all__ = [
    "HOOKS",
    "ORDER_OF_COLLECTIVES",
    "CheckpointInitialValue",
    "CollectiveAllReduceExtended",
    "DistributedDataset",
    "MultiDeviceSaver",
    "ShuffleDataset",
    "SyncOnReadVariable",
    "canonicalize",
    "data_random_seed",
    "dataset_function",
    "gen_random_ops",
    "is_mirrored",
    "is_op_determinism_enabled",
    "local_cpu_devices",
    "mark_as_unsaveable",
    "name_in_function",
    "operations",
    "patient_coordination",
    "random_op",
    "random_seed",
    "regroup",
    "saved_model_save",
    "select_replica",
    "simple_broadcast",
    "traced_for_workers",
    "untuned_device_datasets",
    "wait_for",
    "with_autograph",
]

# For the strategy:
#   CollectiveAllReduceExtended: what a strategy does on N processes with one device each, all but its collectives.
#     `tf.distribute.StrategyExtended` is public, but abstract: variables and input pipelines have no public parts.
#   CheckpointInitialValue: an initial value that holds a value being restored; no public way unwraps it.
#   SyncOnReadVariable: a variable that each replica writes for itself. Ours reads the first rank's, where asked to.
#   canonicalize: the full name of a device. A variable's device is compared with it as text.
#   GraphOrParentsInXlaContext: whether this is being traced for jit_compile=True, where Horovod cannot be called.
#   is_mirrored: whether a value is the same on all replicas, which is not reduced again.
#   mark_as_unsaveable: a traced function with collectives must not go into a SavedModel.
#   regroup, select_replica: between a value per replica and PerReplica, as MirroredStrategy does it for all classes.
#   simple_broadcast: copies a reduced tensor or IndexedSlices to the devices of its destination.
# For what users write:
#   ag_ctx, tf_convert: AutoGraph for one function, with its accounts of errors, where what calls it has none. Of the
#     public ways, `to_graph` gives no accounts and fails without sources, and a `tf.function` is more than that.
# For the clock of compiled code:
#   is_op_determinism_enabled: the public function that turns it on has no counterpart that asks.
# For input pipelines:
#   multi_device_iterator_ops: the datasets that MirroredStrategy puts on each device. Options do not reach them.
# For steps on workers:
#   ParameterServerStrategyV2Extended: warns, with each method, where its function is not traced by the coordinator.
#   tf.data.Dataset: what a pipeline consists of, to find Python functions in it.
#   RemoteValueImpl: the result of a scheduled function. Its public `get` waits for ever, also when no worker is left.
# For several processes as one (tfdist/as_one):
#   DistributedDataset, ShuffleDataset: where ranks start to read together, and what has a new order each time. The
#     public class is an interface.
#   MultiDeviceSaver: writes every checkpoint and the variables of every SavedModel, under temporary names that are the
#     same in all processes. There is no public way to give it others.
#   saved_model_save: what tf.saved_model.save and Keras's export call. Keras's export puts the public name back.
#   data_random_seed, random_op, random_seed, gen_random_ops: where operations without a seed get one. There is no
#     public way to choose seeds for these alone.

HOOKS = {
    CollectiveAllReduceExtended: (
        # overridden
        "_batch_gather_to",
        "_batch_reduce_to",
        "_broadcast_to",
        "_call_for_each_replica",
        "_create_variable",
        "_gather_to_implementation",
        "_get_variable_creator_initial_value",
        "_reduce_to",
        "_replica_ctx_all_reduce",
        # replaced for a while
        "_initialize_local_devices",
        # called
        "_initialize_single_worker",
        "_input_workers_with_options",
        "_in_multi_worker_mode",
        "_make_input_context",
    ),
    Context: ("configure_coordination_service",),
    DistributedDataset: ("__init__", "__iter__"),
    MultiDeviceSaver: ("save",),
    ShuffleDataset: ("_inputs",),
    data_random_seed: ("get_seed",),
    gen_random_ops: ("random_shuffle",),
    multi_device_iterator_ops: ("_create_device_dataset",),
    random_op: ("_random",),
    random_seed: ("get_seed",),
    tf.data.Dataset: ("_as_serialized_graph",),
    ParameterServerStrategyV2Extended: (
        "_allow_run_without_coordinator",
        "_assert_being_scheduled_by_cluster_coordinator",
    ),
    RemoteValueImpl: ("_status_available_event", "_set_error", "_set_values"),
    saved_model_save: ("save_and_return_nodes",),
    SyncOnReadVariable: ("_get_cross_replica", "_get_replica", "read_value", "value"),
}
"""Names inside of TensorFlow's classes and modules that ours override or rely on."""


ORDER_OF_COLLECTIVES = "order_of_collectives"
"""Name of the variable that all traced collectives use, and that TensorFlow names when it cannot save one."""


def with_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, in which Python's `if`, `while` and `for` work on tensors as in a tf.function; for users' functions.

    Our own are traced without AutoGraph: to convert them took seconds of each start.
    """
    converted: Callable[..., Any] = tf_convert(function, ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED))
    return converted


def in_xla() -> bool:
    """Whether the function being traced will be compiled by XLA."""
    return bool(GraphOrParentsInXlaContext(ops.get_default_graph()))


def dataset_function() -> tf.Graph | None:
    """The function of a tf.data pipeline that is being traced, if any: only the names of such graphs tell."""
    graph = ops.get_default_graph()
    while graph is not None and not str(getattr(graph, "name", "")).startswith("Dataset_"):
        graph = getattr(graph, "outer_graph", None)
    return graph


@contextlib.contextmanager
def local_cpu_devices(count: int) -> Iterator[None]:
    """While a multi-worker strategy is made inside, it has so many logical CPU devices in this process.

    TensorFlow asks its cluster resolver for GPUs and TPUs alone, and has one replica where there are none.
    """
    original = CollectiveAllReduceExtended._initialize_local_devices
    if count == 1:
        yield
        return

    def devices(self: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(count)), "CPU"

    CollectiveAllReduceExtended._initialize_local_devices = devices
    try:
        yield
    finally:
        CollectiveAllReduceExtended._initialize_local_devices = original


@contextlib.contextmanager
def untuned_device_datasets() -> Iterator[None]:
    """While iterators over several devices are made inside, their parts on the devices are not tuned.

    There is nothing to tune in them. But such an iterator, when it is deleted, waits for the tuning thread's next
    round, which comes after up to a minute.
    """
    original = multi_device_iterator_ops._create_device_dataset
    untuned = tf.data.Options()
    untuned.autotune.enabled = False

    def create(*args: Any, **kwargs: Any) -> tf.data.Dataset:
        return original(*args, **kwargs).with_options(untuned)

    multi_device_iterator_ops._create_device_dataset = create
    try:
        yield
    finally:
        multi_device_iterator_ops._create_device_dataset = original


@contextlib.contextmanager
def traced_for_workers(strategy: tf.distribute.ParameterServerStrategy) -> Iterator[None]:
    """While a function that workers will run is traced on the chief, TensorFlow does not warn that it runs there."""
    extended = strategy.extended
    before = extended._allow_run_without_coordinator
    extended._allow_run_without_coordinator = True
    try:
        yield
    finally:
        extended._allow_run_without_coordinator = before


@contextlib.contextmanager
def patient_coordination(seconds: float) -> Iterator[None]:
    """A strategy that is opened here lets so many seconds pass without a beat of TensorFlow's coordination service.

    Its own limit is ten, and an answer must come within half of it: a network that is cut for four seconds, after which
    TCP waits two more before it tries again, ended the job. The strategy has no option for it.
    """
    before = Context.configure_coordination_service

    def configure(self: Context, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **{"heartbeat_timeout_in_ms": int(1000 * seconds), **kwargs})

    Context.configure_coordination_service = configure
    try:
        yield
    finally:
        Context.configure_coordination_service = before


def operations(dataset: tf.data.Dataset) -> set[str]:
    """The kinds of operations in a dataset's graph and its functions, as workers get it."""
    graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {str(node.op) for node in nodes}


def wait_for(result: RemoteValueImpl, seconds: float) -> bool:
    """Whether a scheduled function has ended in this time."""
    return bool(result._status_available_event.wait(seconds))


_collectives_of: MutableMapping[tf.Graph, dict[str, int]] = WeakKeyDictionary()


def name_in_function(kind: str) -> str:
    """A name for the collective being traced: equal on all ranks, unique in the tf.function, e.g. `step.reduce.2`.

    It counts per traced function, branches and loops included. A rank that traces a function again, or traces
    other functions in between, so comes to the same names; a count over the whole process would not.
    """
    graph = ops.get_default_graph()
    # The bodies of tf.cond and tf.while_loop are graphs of their own: only private attributes tell.
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    counts = _collectives_of.setdefault(graph, defaultdict(int))
    number = counts[kind]
    counts[kind] += 1
    function = re.sub(r"[^A-Za-z0-9_.]", "", getattr(graph, "name", "")) or "graph"
    return f"{function.lstrip('_.') or 'function'}.{kind}.{number}"


_ARITHMETIC = {"AddV2", "Cast", "Identity", "Mul", "Sub"}


def counts_alike(value: tf.Tensor, variable: tf.Variable) -> bool:
    """Whether a traced value is computed from the variable itself and constants, and so is the same on all ranks.

    This spares a collective in every step: a Keras optimizer counts its steps in a variable of which only the
    first replica's value is taken. False where it cannot be told.
    """
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor):
        return False
    handle = ops.get_default_graph().capture(variable.values[0].handle)
    pending, seen = [value.op], 0
    while pending and seen < 16:
        op = pending.pop()
        seen += 1
        if op.type == "ReadVariableOp" and op.inputs[0] is handle:
            continue
        if op.type == "Const" and "replica_id" not in op.name:  # the replica's own number is a constant, too
            continue
        if op.type not in _ARITHMETIC:
            return False
        pending += [tensor.op for tensor in op.inputs]
    return not pending
