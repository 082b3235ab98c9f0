"""Checks of the parts of a strategy. Each yields (what, value); see strategy_program.py."""

from __future__ import annotations

import collections
import copy
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.full import full

FOLDER = Path(sys.argv[1], "files")  # the same for all ranks
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
A = tf.VariableAggregation
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
OTHERS = ["complex64", "complex128", "bool", "string"]
TRACED = FLOATS + INTEGERS + OTHERS if full() else ["float16", "float32", "int32", "int64", "complex64", "bool"]
"""Kinds of numbers that are looked at in a tf.function too; every one is looked at eagerly."""


def mine(strategy, value):
    """What each replica of this process saw."""
    return {"mine": list(strategy.experimental_local_results(value))}


def error_of(call):
    """The kind of error that a call meets, or its result."""
    try:
        return call()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)[:200]}


def replica():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def per_replica(strategy, of, dtype="float32"):
    """A value for each replica: of(replica number)."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant(of(c.replica_id_in_sync_group), dtype)
    )


def some(few, *more):
    """What is enough for most changes, or all of it with `--full`."""
    return [*few, *more] if full() else few


def traced_as_it_is(fn):
    """A tf.function of one of many checks alike, for which AutoGraph would take longer than all the rest."""
    return tf.function(fn, autograph=False)


def both_ways(strategy, fn, traced=True):
    """The result of running `fn` on the replicas eagerly, and in a tf.function."""
    yield "eager", error_of(lambda: mine(strategy, strategy.run(fn)))
    if traced:
        yield "graph", error_of(lambda: mine(strategy, traced_as_it_is(lambda: strategy.run(fn))()))


def check_group(s):
    def who():
        context = tf.distribute.get_replica_context()
        return context.replica_id_in_sync_group, context.num_replicas_in_sync

    yield "sizes", [s.num_replicas_in_sync]
    yield from both_ways(s, who)
    with s.scope():
        yield "cross", [tf.distribute.in_cross_replica_context(), tf.distribute.get_replica_context() is None]
        yield "strategy", tf.distribute.get_strategy() is s
    yield "outside", tf.distribute.has_strategy()
    yield "inside", mine(s, s.run(lambda: tf.constant(tf.distribute.in_cross_replica_context())))


def value_of(dtype, number):
    if dtype == "bool":
        return tf.constant([True, False])
    if dtype == "string":
        return tf.constant(["a", "b"])
    return tf.cast(tf.constant([number + 1, 3]), dtype)


def check_all_reduce(s):
    for dtype in FLOATS + INTEGERS + OTHERS:
        for op in (SUM, MEAN):

            def fn(dtype=dtype, op=op):
                value = tf.cast([replica() + 1, 3], dtype) if dtype not in ("bool", "string") else value_of(dtype, 0)
                return tf.distribute.get_replica_context().all_reduce(op, value)

            for way, result in both_ways(s, fn, dtype in TRACED):
                yield f"{dtype} {op.name} {way}", result


def check_all_reduce_large(s):
    for dtype in ("float16", "bfloat16"):

        def fn(dtype=dtype):
            return tf.distribute.get_replica_context().all_reduce(MEAN, tf.constant([40000.0], dtype))

        for way, result in both_ways(s, fn):
            yield f"{dtype} {way}", result


def check_all_reduce_nested(s):
    def fn():
        r = tf.cast(replica(), tf.float32)
        value = {"a": r + 1, "b": [tf.fill([2, 2], r), (tf.cast(r, tf.int64), tf.cast(r, tf.float64))]}
        return tf.distribute.get_replica_context().all_reduce("sum", value)

    yield from both_ways(s, lambda: tf.nest.flatten(fn()))


def check_all_reduce_sparse(s):
    def fn(op, repeat=False):
        n = replica() + 1 if not repeat else tf.constant(2)
        slices = tf.IndexedSlices(tf.ones([n, 2]) * tf.cast(n, tf.float32), tf.range(n), tf.constant([4, 2]))
        reduced = tf.distribute.get_replica_context().all_reduce(op, [slices, tf.cast(n, tf.float32)])
        return tf.convert_to_tensor(reduced[0]), reduced[0].indices, reduced[1]

    for op in (SUM, MEAN):
        for way, result in both_ways(s, lambda op=op: fn(op)):
            yield f"uneven {op.name} {way}", result
        for way, result in both_ways(s, lambda op=op: fn(op, True)):
            yield f"even {op.name} {way}", result


def check_all_reduce_gradient(s):
    for op in (SUM, MEAN):

        def fn(op=op):
            x, y = tf.cast(replica() + 1, tf.float32), tf.constant([1.0, 2.0])
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                a, b = tf.distribute.get_replica_context().all_reduce(op, [x, y * x])
                z = a * a * x + tf.reduce_sum(b * b) * (x + 1)
            return tape.gradient(z, [x, y])

        for way, result in both_ways(s, fn):
            yield f"{op.name} {way}", result


def check_all_gather(s):
    for dtype in FLOATS + INTEGERS + OTHERS:

        def fn(dtype=dtype):
            value = tf.cast([replica() + 1, 3], dtype) if dtype not in ("bool", "string") else value_of(dtype, 0)
            return tf.distribute.get_replica_context().all_gather(value, axis=0)

        for way, result in both_ways(s, fn, dtype in TRACED):
            yield f"{dtype} {way}", result


def check_all_gather_shapes(s):
    def uneven(axis):
        n = replica() + 1
        shape = [[n, 2, 3], [2, n, 3], [2, 3, n]][axis]
        value = tf.fill(shape, tf.cast(n, tf.float32))
        return tf.distribute.get_replica_context().all_gather(value, axis=axis)

    for axis in (0, 1, 2):
        for way, result in both_ways(s, lambda axis=axis: uneven(axis)):
            yield f"axis {axis} {way}", result

    def empty():
        return tf.distribute.get_replica_context().all_gather(tf.ones([replica(), 2]), axis=0)

    for way, result in both_ways(s, empty):
        yield f"empty on one {way}", result

    def nested():
        r = replica()
        value = {"a": [tf.reshape(r, [1])], "b": tf.fill([1, 2], r + 5)}
        return tf.nest.flatten(tf.distribute.get_replica_context().all_gather(value, axis=0))

    for way, result in both_ways(s, nested):
        yield f"nested {way}", result

    def gradient():
        n = replica() + 1
        x = tf.ones([n, 2]) * tf.cast(n, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.distribute.get_replica_context().all_gather(x, axis=0)
            z = tf.reduce_sum(y * y * tf.cast(n, tf.float32))
        return tape.gradient(z, x)

    for way, result in both_ways(s, gradient):
        yield f"gradient {way}", result


def check_reduce(s):
    cases = {
        "float": (lambda r: [1.0 + r, 2.0], "float32"),
        "half": (lambda r: [1.0 + r, 2.0], "float16"),
        "int32": (lambda r: [1 + r, 2], "int32"),
        "int64": (lambda r: [1 + r, 2], "int64"),
        "uneven": (lambda r: [1.0 + r] * (r + 1), "float32"),
        "matrix": (lambda r: [[1.0 + r, 2.0]] * (r + 1), "float32"),
        "int matrix": (lambda r: [[1 + r, 2]] * 2, "int32"),
    }
    if full():
        cases["brain"] = (lambda r: [1.0 + r, 2.0], "bfloat16")
    for name, (of, dtype) in cases.items():
        for op in (SUM, MEAN):
            for axis in some([None, 0, 1, [0]], -1, (0, 1)):
                if (axis is None and name in ("uneven", "matrix")) or (name == "matrix" and axis in (1, -1)):
                    continue  # what is left would be of another shape on each replica
                value = per_replica(s, of, dtype)
                eager = lambda value=value, op=op, axis=axis: s.reduce(op, value, axis=axis)  # noqa: E731
                yield f"{name} {op.name} axis {axis} eager", error_of(eager)
                yield f"{name} {op.name} axis {axis} graph", error_of(lambda eager=eager: traced_as_it_is(eager)())


def check_reduce_more(s):
    value = per_replica(s, lambda r: 1.0 + r)
    yield "scalar", [s.reduce(SUM, value, axis=None), s.reduce("MEAN", value, axis=None)]
    yield "result of run", s.reduce("SUM", s.run(lambda: tf.cast(replica(), tf.float32) + 1), axis=None)
    yield "bad op", error_of(lambda: s.reduce("max", value, axis=None))
    yield "in replica", error_of(lambda: s.run(lambda: s.reduce(SUM, tf.constant(1.0), axis=None)))
    sparse = s.run(lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.reshape(replica(), [1]), tf.constant([3, 2])))
    yield "sparse", error_of(lambda: tf.convert_to_tensor(s.reduce(SUM, sparse, axis=None)))
    nested = s.run(lambda: {"a": replica(), "b": (tf.cast(replica(), tf.float32), tf.ones([2]))})
    yield "nested", error_of(lambda: s.reduce(SUM, nested, axis=None))
    with s.scope():
        v = tf.Variable(3.0)
    yield "mirrored variable", error_of(lambda: s.reduce(MEAN, v, axis=None))

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = s.reduce(SUM, s.run(lambda x: x * tf.cast(replica() + 1, tf.float32), args=(x,)), axis=None)
        return tape.gradient(y, x)

    yield "gradient", error_of(lambda: gradient(tf.constant(2.0)))


def check_reduce_variables(s):
    with s.scope():
        v = tf.Variable([1.0, 2.0])

    def both(fn):
        return list(both_ways(s, fn))

    yield "all_reduce", both(lambda: tf.distribute.get_replica_context().all_reduce(SUM, v))
    yield "in a list", s.reduce(SUM, s.run(lambda: [v, v + 1]), axis=None)
    yield "none", s.reduce(MEAN, s.run(lambda: {"a": tf.cast(replica(), tf.float32), "b": None}), axis=None)
    holder = copy.deepcopy({"strategy": s})
    yield "copied", holder["strategy"].num_replicas_in_sync


def check_gather(s):
    for dtype in FLOATS + INTEGERS + ["complex64", "bool", "string"]:
        value = s.experimental_distribute_values_from_function(
            lambda c, dtype=dtype: value_of(dtype, c.replica_id_in_sync_group)
        )
        yield f"{dtype} eager", error_of(lambda value=value: s.gather(value, axis=0))
        if dtype in TRACED:
            yield f"{dtype} graph", error_of(lambda value=value: traced_as_it_is(lambda: s.gather(value, axis=0))())
    for axis in (0, 1):
        shape = (lambda r: np.full([r + 1, 2], r + 1)) if axis == 0 else (lambda r: np.full([2, r + 1], r + 1))
        yield (
            f"uneven axis {axis}",
            error_of(lambda axis=axis, shape=shape: s.gather(per_replica(s, shape), axis=axis)),
        )
    yield "scalar", error_of(lambda: s.gather(per_replica(s, lambda r: 1.0), axis=0))


def check_merge_call(s):
    with s.scope():
        v = tf.Variable([0.0, 0.0], aggregation=A.SUM)
        w = tf.Variable(0.0)

    def merge(strategy, a, b):
        assert tf.distribute.in_cross_replica_context()
        a = strategy.extended.reduce_to(SUM, a, v)
        b, c = strategy.extended.batch_reduce_to(MEAN, [(b, w), (b, w)])
        strategy.extended.update(v, lambda v, a: v.assign_add(a), args=(a,))
        strategy.extended.update(w, lambda w, b, k: w.assign_sub(b * k), args=(b,), kwargs={"k": 2.0}, group=False)
        return c

    def fn():
        r = tf.cast(replica(), tf.float32)
        return tf.distribute.get_replica_context().merge_call(merge, args=(tf.stack([r, 1.0]), r + 1))

    for way, result in both_ways(s, fn):
        yield way, result
        yield f"variables {way}", [v, w]
    with s.scope():
        yield "update", mine(s, s.extended.update(v, lambda v: v.assign(v * 2), group=True))
        yield "update no group", mine(s, s.extended.update(v, lambda v: v.assign(v * 2), group=False))
    yield "after", v


def check_merge_call_in_control_flow(s):
    with s.scope():
        v = tf.Variable(0.0)

    def fn():
        def merge(strategy, x):
            strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(strategy.extended.reduce_to(SUM, x, v),))

        def yes():
            tf.distribute.get_replica_context().merge_call(merge, args=(tf.constant(1.0),))
            return 1

        return tf.cond(tf.constant(True), yes, lambda: 0)

    yield "cond", error_of(lambda: mine(s, tf.function(lambda: s.run(fn))()))


def check_control_flow(s):
    @tf.function
    def loop(n):
        def body(i, total, seen):
            x = s.run(lambda: tf.distribute.get_replica_context().all_reduce(SUM, tf.cast(i + replica(), tf.float32)))
            x = s.experimental_local_results(x)[0]
            y = s.reduce(SUM, s.run(lambda: tf.cast(replica() + i, tf.int64)), axis=None)
            extra = tf.cond(i % 2 == 0, lambda: s.reduce(MEAN, s.run(lambda: tf.constant(4.0)), axis=None), lambda: 0.0)
            return i + 1, total + x + extra, seen.write(i, y)

        seen = tf.TensorArray(tf.int64, n)
        _, total, seen = tf.while_loop(lambda i, *_: i < n, body, [0, 0.0, seen], parallel_iterations=10)
        return total, seen.stack()

    yield "while", loop(tf.constant(30))

    @tf.function
    def constants():
        return [s.reduce(SUM, s.run(lambda: tf.constant(2.0)), axis=None) for _ in range(3)]

    yield "constants", [constants(), constants()]


def check_nested_functions(s):
    @tf.function
    def inner(x):
        return tf.distribute.get_replica_context().all_reduce(SUM, x)

    @tf.function
    def outer(x):
        return inner(x) + inner(x + 1) * inner(tf.ones([2]) * x)

    yield "run of a function", mine(s, s.run(outer, args=(tf.constant(1.0),)))
    yield "in a function", mine(s, tf.function(lambda: s.run(outer, args=(tf.constant(2.0),)))())


def check_run(s):
    value = per_replica(s, lambda r: 10.0 * r)
    Pair = collections.namedtuple("Pair", "a b")

    def fn(x, y, *, z):
        return {"sum": x["v"][0] + y + z.a}, Pair(x["v"][0], None), [z.b]

    args = ({"v": [value]}, tf.constant(1.0))
    kwargs = {"z": Pair(value, "text")}
    out = s.run(fn, args=args, kwargs=kwargs)
    yield "structure", [type(out).__name__, type(out[1]).__name__, out[1].b is None, out[2] == ["text"]]
    yield "sum", mine(s, out[0]["sum"])
    graph = tf.function(lambda: s.run(fn, args=args, kwargs=kwargs)[0]["sum"])()
    yield "graph", mine(s, graph)
    yield "none", s.run(lambda: None) is None
    yield "bad args", error_of(lambda: s.run(fn, args=3))
    with s.scope():
        v = tf.Variable(2.0)
    yield "a variable", s.run(lambda: v) is v
    yield "of arguments", mine(s, s.run(lambda v: v + 1, args=(v,)))
    yield (
        "local results of nested",
        [
            len(s.experimental_local_results({"a": value, "b": value})),
            {"mine": [x["a"] for x in s.experimental_local_results({"a": value, "b": [value]})]},
        ],
    )
    yield "local results of a tensor", [len(s.experimental_local_results(tf.constant(1.0)))]
    autograph = s.run(tf.function(autographed), args=(value,))
    yield "autograph", mine(s, autograph)


def autographed(x):
    if x > 5.0:
        x = x * 2
    else:
        x = x - 1
    for i in tf.range(3):
        x += tf.cast(i, tf.float32)
    return x


def check_values(s):
    value = s.experimental_distribute_values_from_function(
        lambda c: tf.constant([c.replica_id_in_sync_group, c.num_replicas_in_sync])
    )
    yield "values", mine(s, value)
    yield "run", mine(s, s.run(lambda x: x + 1, args=(value,)))


def check_variables(s):
    Sync = tf.VariableSynchronization
    for sync in (Sync.ON_WRITE, Sync.ON_READ):
        for aggregation in (A.NONE, A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA):
            for method in some(["assign", "assign_add"], "assign_sub"):
                for where in ("eager", "graph"):
                    if where == "graph" and method not in some(["assign_add"], "assign"):
                        continue  # assign_sub is as assign_add
                    name = f"{sync.name} {aggregation.name} {method} {where}"

                    def make(sync=sync, aggregation=aggregation):
                        with s.scope():
                            return tf.Variable(1.0, synchronization=sync, aggregation=aggregation)

                    wrap = traced_as_it_is if where == "graph" else (lambda f: f)
                    v = make()

                    def in_replica(v=v, method=method, wrap=wrap):
                        wrap(lambda: s.run(lambda: getattr(v, method)(tf.cast(replica(), tf.float32) + 2.0)))()
                        return {"mine": [x.numpy().item() for x in s.experimental_local_results(v)]}

                    yield f"{name} in replica", error_of(in_replica)
                    yield (
                        f"{name} read in replica",
                        error_of(lambda v=v: mine(s, s.run(lambda: v.read_value()))),
                    )
                    yield f"{name} read outside", error_of(lambda v=v: v.read_value())
                    yield f"{name} numpy", error_of(lambda v=v: v.numpy().item())
                    yield f"{name} arithmetic outside", error_of(lambda v=v: v + 1.0)
                    v = make()

                    def across(v=v, method=method, wrap=wrap):
                        def change():
                            with s.scope():
                                getattr(v, method)(6.0)

                        wrap(change)()
                        return {"mine": [x.numpy().item() for x in s.experimental_local_results(v)]}

                    yield f"{name} across", error_of(across)
                    v = make()

                    def python(v=v, method=method, wrap=wrap):
                        wrap(lambda: s.run(lambda: getattr(v, method)(3.0)))()
                        return {"mine": [x.numpy().item() for x in s.experimental_local_results(v)]}

                    yield f"{name} in replica, Python number", error_of(python)


def check_variable_kinds(s):
    with s.scope():
        v = tf.Variable([1.0, 2.0], name="v", trainable=False)
        c = tf.Variable(3, dtype=tf.int64, aggregation=A.ONLY_FIRST_REPLICA)
        r = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=A.SUM)
    yield "class", [type(v).__name__, type(r).__name__]
    yield (
        "attributes",
        [v.name, v.shape.as_list(), v.dtype.name, v.trainable, str(v.aggregation), str(v.synchronization)],
    )
    yield (
        "created in scope",
        [s.extended.variable_created_in_scope(v), s.extended.variable_created_in_scope(c)],
    )
    yield "strategy", v.distribute_strategy is s
    outside = tf.Variable(1.0)
    yield "outside", s.extended.variable_created_in_scope(outside)
    with s.scope(), s.extended.colocate_vars_with(v):
        w = tf.Variable(5.0)
    yield "colocated", [type(w).__name__, w]
    yield "colocated with foreign", error_of(lambda: colocate(s, outside))
    s.run(lambda: c.assign_add(1))
    yield "counter", c
    yield "mean of integers", error_of(lambda: integer_mean(s))
    yield "none", error_of(lambda: no_synchronization(s))
    for dtype in FLOATS + INTEGERS + ["complex64", "bool", "string"]:

        def make(dtype=dtype):
            with s.scope():
                return tf.Variable(value_of(dtype, 0))

        yield f"of {dtype}", error_of(lambda make=make: make().read_value())


def colocate(s, v):
    with s.scope(), s.extended.colocate_vars_with(v):
        return tf.Variable(5.0)


def integer_mean(s):
    with s.scope():
        return tf.Variable(1, aggregation=A.MEAN)


def no_synchronization(s):
    with s.scope():
        return tf.Variable(1.0, synchronization=tf.VariableSynchronization.NONE)


def check_variables_made_in_run(s):
    made = {}

    def fn():
        if "v" not in made:
            made["v"] = tf.Variable(tf.ones([2]), aggregation=A.MEAN)
        made["v"].assign_add(tf.ones([2]) * tf.cast(replica(), tf.float32))
        return made["v"].read_value()

    yield "eager", mine(s, s.run(fn))
    yield "type", type(made["v"]).__name__
    made.clear()
    step = tf.function(lambda: s.run(fn))
    yield "graph", [mine(s, step()), mine(s, step())]
    made.clear()
    yield "function in run", [mine(s, s.run(tf.function(fn)))]

    made.clear()

    @tf.function
    def random():
        if "v" not in made:
            made["v"] = tf.Variable(tf.random.normal([3], seed=s.num_replicas_in_sync))
        return made["v"].read_value()

    yield (
        "random, one value",
        len({str(x.numpy().tolist()) for x in s.experimental_local_results(s.run(random))}),
    )


def check_scatter(s):
    for aggregation in (A.NONE, A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA):
        for method in some(
            ["scatter_add", "scatter_update"], "scatter_sub", "scatter_max", "scatter_min", "scatter_mul"
        ):
            with s.scope():
                v = tf.Variable([1.0, 2.0, 3.0], aggregation=aggregation)

            def fn(v=v, method=method):
                value = tf.ones([1]) * (tf.cast(replica(), tf.float32) + 5)
                getattr(v, method)(tf.IndexedSlices(value, tf.reshape(replica(), [1])))

            def run(v=v, fn=fn):
                traced_as_it_is(lambda: s.run(fn))()
                return {"mine": [x.numpy().tolist() for x in s.experimental_local_results(v)]}

            yield f"{aggregation.name} {method}", error_of(run)


def rows_of(s, dataset, steps=20):
    """For each step, the rows that each replica of this process got."""
    seen = []
    iterator = iter(dataset)
    for _ in range(steps):
        try:
            batch = next(iterator)
        except StopIteration:
            seen.append("end")
            break
        seen.append({"mine": [x.numpy().tolist() for x in s.experimental_local_results(batch)]})
    return seen


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def check_datasets(s):
    P = tf.data.experimental.AutoShardPolicy
    base = tf.data.Dataset.range(11)
    others = ("drop", "repeat", "infinite", "unbatched", "map after")
    for policy in (P.OFF, P.DATA, P.AUTO):  # files: see below
        for name, dataset in {
            "batch 4": base.batch(4),
            "batch 3": base.batch(3),
            "batch 1": base.take(3).batch(1),
            "drop": base.batch(4, drop_remainder=True),
            "repeat": base.batch(4).repeat(2),
            "infinite": base.batch(4).repeat(),
            "from generator": tf.data.Dataset.from_generator(
                lambda: iter(range(5)), output_signature=tf.TensorSpec([], tf.int64)
            ).batch(2),
            "unbatched": tf.data.Dataset.range(4),
            "map after": base.batch(4).map(lambda x: x * 10).prefetch(2),
        }.items():
            if policy == P.AUTO and name not in some(["batch 3", "from generator"], "batch 4", "batch 1", *others):
                continue  # which goes by rows where there are no files
            yield (
                f"{policy.name} {name}",
                error_of(
                    lambda d=dataset, p=policy: rows_of(s, s.experimental_distribute_dataset(with_policy(d, p)), 8)
                ),
            )


def check_file_datasets(s):
    """Lines of text files, by the policies that shard by files: one process reads all, several read their own."""
    P = tf.data.experimental.AutoShardPolicy
    for count in (2, 3):
        names = [str(FOLDER / f"{count}-{i}-{replicas_of_process(s)}.txt") for i in range(count)]
        if s.extended.should_checkpoint:
            for i, name in enumerate(names):
                tf.io.write_file(name, "".join(f"{10 * i + j}\n" for j in range(4)))
        s.reduce(SUM, s.run(lambda: tf.constant(1.0)), axis=None)  # the files are there
        for policy in (P.FILE, P.AUTO):
            lines = tf.data.TextLineDataset(names).map(tf.strings.to_number).batch(4)
            yield f"{policy.name} {count}", rows_of(s, s.experimental_distribute_dataset(with_policy(lines, policy)))


def replicas_of_process(s):
    return len(s.extended.worker_devices)


def check_unseeded_shuffles(s):
    """Every row once, whatever the order."""
    d = tf.data.Dataset.range(8)
    pipelines = {
        "shuffle": d.shuffle(8).batch(4),
        "before map": d.shuffle(4).map(lambda x: x, num_parallel_calls=2).batch(4),
        "of batches": d.batch(2).shuffle(4).unbatch().batch(4),
        "not again": d.shuffle(8, reshuffle_each_iteration=False).batch(4),
        "function": tf.data.Dataset.range(1).flat_map(permuted).batch(4),
        "sampled": tf.data.Dataset.sample_from_datasets([d.take(4), d.skip(4)]).batch(4),
    }
    for name, dataset in pipelines.items():
        distributed = s.experimental_distribute_dataset(dataset)
        # Four orders of four batches are alike once in 14,000 times.
        orders = [np.concatenate([all_rows(s, x) for x in distributed]).tolist() for _ in range(9 if full() else 4)]
        yield name, [sorted(order) for order in orders]
        yield f"{name} again", len({str(order) for order in orders}) > 1


def permuted(_):
    return tf.data.Dataset.from_tensor_slices(tf.random.shuffle(tf.range(8, dtype=tf.int64)))


def all_rows(s, batch):
    return s.gather(batch, axis=0).numpy()


def check_dataset_loops(s):
    dataset = s.experimental_distribute_dataset(
        tf.data.Dataset.range(10).map(lambda x: tf.cast(x, tf.float32)).batch(4)
    )

    @tf.function
    def epoch(data):
        total = 0.0
        steps = 0
        for batch in data:
            total += s.reduce(SUM, s.run(lambda x: tf.reduce_sum(x * x), args=(batch,)), axis=None)
            steps += 1
        return total, steps

    yield "for in function", epoch(dataset)
    total = 0.0
    for batch in dataset:
        total += s.reduce(SUM, batch, axis=0)
    yield "for outside", total
    mean = [s.reduce(MEAN, batch, axis=0) for batch in dataset]
    yield "mean over rows", mean

    @tf.function
    def steps(iterator):
        out = []
        for _ in range(2):
            out.append(s.reduce(SUM, s.run(tf.reduce_sum, args=(next(iterator),)), axis=None))
        return out

    iterator = iter(dataset)
    yield "next in function", steps(iterator)

    @tf.function
    def optional(iterator):
        data = iterator.get_next_as_optional()
        return data.has_value()

    yield "optional", [optional(iterator), optional(iterator)]
    yield (
        "reduce method",
        error_of(lambda: dataset.reduce(tf.constant(0.0), lambda a, b: a + s.reduce(SUM, b, axis=0))),
    )
    yield "element spec", str(type(dataset.element_spec).__name__)


def check_dataset_functions(s):
    def fn(context):
        n = context.get_per_replica_batch_size(4)
        return tf.data.Dataset.range(10).shard(context.num_input_pipelines, context.input_pipeline_id).batch(n)

    def pipelines(context):
        return tf.data.Dataset.from_tensors([context.num_replicas_in_sync]).repeat(3).batch(1)

    total = tf.constant(0, tf.int64)
    for batch in s.distribute_datasets_from_function(fn):
        total += s.reduce(SUM, batch, axis=0)
    yield "sum", total
    yield "context", rows_of(s, s.distribute_datasets_from_function(pipelines))
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    total = tf.constant(0, tf.int64)
    for batch in s.distribute_datasets_from_function(fn, options):
        total += s.reduce(SUM, batch, axis=0)
    yield "options", total
    uneven = lambda c: tf.data.Dataset.range(2 * c.input_pipeline_id + 2).batch(1)  # noqa: E731
    steps = 0
    for _ in s.distribute_datasets_from_function(uneven):
        steps += 1
    yield "steps are agreed", steps >= 2


def check_structured_datasets(s):
    x = {"a": np.arange(6.0, dtype="float32"), "b": np.arange(12).reshape(6, 2)}
    data = s.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, np.arange(6))).batch(4))
    seen = []
    for features, label in data:
        seen.append(
            s.reduce(
                SUM,
                s.run(
                    lambda f, y: tf.reduce_sum(f["a"]) + tf.cast(tf.reduce_sum(y), tf.float32),
                    args=(features, label),
                ),
                axis=None,
            )
        )
    yield "dictionary", seen
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3], [], [4, 5, 6]])).batch(2)
    total = 0
    for batch in s.experimental_distribute_dataset(ragged):
        total += s.reduce(SUM, s.run(lambda r: tf.reduce_sum(r.values), args=(batch,)), axis=None)
    yield "ragged", total
    sparse = tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [0, 4]])).batch(2)
    total = 0
    for batch in s.experimental_distribute_dataset(sparse):
        total += s.reduce(SUM, s.run(lambda r: tf.reduce_sum(r.values), args=(batch,)), axis=None)
    yield "sparse", total


def check_random(s):
    with s.scope():
        g = tf.random.Generator.from_seed(7)
    yield "generator", error_of(lambda: mine(s, s.run(lambda: g.normal([2]))))
    yield "generator again", error_of(lambda: mine(s, s.run(lambda: g.normal([2]))))
    yield "stateless", mine(s, s.run(lambda: tf.random.stateless_uniform([2], tf.stack([1, replica()]))))


def check_tables(s):
    with s.scope():
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2]), tf.constant([10, 20])), -1
        )
    yield "lookup", mine(s, s.run(lambda: table.lookup(tf.constant([1, 2, 3]))))
    yield "graph", mine(s, tf.function(lambda: s.run(lambda: table.lookup(replica() + 1)))())


def check_sync_on_read_context(s):
    with s.scope():
        total = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=A.SUM, trainable=False)

    @tf.function
    def step():
        def fn():
            total.assign_add(tf.cast(replica() + 1, tf.float32))

        s.run(fn)
        return total.read_value()

    yield "read in function", [step(), step()]
    yield "convert", tf.convert_to_tensor(total)
    total.assign(8.0)
    yield "assign outside", [total, {"mine": [x.numpy().item() for x in s.experimental_local_results(total)]}]
