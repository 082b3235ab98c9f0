"""One process of a measurement: the time of one all-reduce, by its size, on the path that a training step takes.

    python -m tfdist.evidence.allreduce_program FILE BACKEND REPLICAS [SIZES]          alone
    mpirun -np REPLICAS python -m tfdist.evidence.allreduce_program …                  under mpirun

SIZES are bytes, separated by commas. The chief writes FILE: {"backend", "replicas", "points": [{"bytes", "seconds"}]}.

A size is reduced again and again inside one compiled loop, as chunks of steps are. The buffer is put together from two
tensors and taken apart again, as that of gradients is, so these copies count.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.cluster.channel import shared
from tfdist.errors import EnvironmentProblem, UsageError
from tfdist.strategies.session import Session, open_session
from tfdist.strategies.table import BACKENDS, Options, check_backend

__all__ = ["SIZES", "Reduction", "main"]

SIZES = tuple(1 << n for n in range(10, 23, 2))
"""Bytes of the buffers: 1 KB to 4 MB."""

_BLOCK_SECONDS, _BLOCKS = 0.1, 5
_MOST_COUNTED = 1 << 22
"""Rounds of a block times replicas: what travels as the counter stays exact in float32."""


def main(file: Path, backend: str, replicas: int, sizes: Sequence[int] = SIZES) -> None:
    """Measure all sizes. Every process of the job calls it alike.

    Raises:
        UsageError: the backend has no all-reduce, or the launcher has started another number of replicas.
        EnvironmentProblem: a sum over the replicas is wrong; on every process.
    """
    check_backend(backend)
    kind = BACKENDS[backend]
    if kind.asynchronous:
        raise shared(UsageError(f"backend={backend!r} has no all-reduce: its workers take steps each on its own."))
    session = open_session(backend, Options(replicas=replicas if kind.devices and not kind.processes else None))
    there = session.strategy.num_replicas_in_sync
    if there != replicas:
        raise shared(
            UsageError(
                f"replicas={replicas}, but backend={backend!r} has {there}. Start as many: mpirun -np {replicas}"
            )
        )
    reductions = [Reduction(session, size) for size in sizes]
    rounds = [reduction.enough() for reduction in reductions]
    # In turns, so that a disturbance does not hit all blocks of one size.
    blocks = [[r.block(number) / number for r, number in zip(reductions, rounds, strict=True)] for _ in range(_BLOCKS)]
    points = [
        {"bytes": size, "seconds": statistics.median(seconds)}
        for size, seconds in zip(sizes, zip(*blocks, strict=True), strict=True)
    ]
    if session.is_chief:
        file.write_text(json.dumps({"backend": backend, "replicas": replicas, "points": points}) + "\n")


class Reduction:
    """All-reduces of one size.

    Replica r holds n − 1 numbers whose sums over the replicas are known, and a counter. What it adds to the counter
    depends on the last sum s: 2s from each replica but the first, and 1 − (2R − 3)s from that, which makes s + 1. So no
    round can begin before the last has ended, and the counter tells how many there have been. All is exact in float32.
    """

    def __init__(self, session: Session, size: int) -> None:
        """Trace the loop.

        Args:
            size: bytes that each replica sends.
        """
        import tensorflow as tf

        # Not earlier: a process is prepared before TensorFlow is imported.
        from tfdist.training.reduction import sum_over_replicas

        if size < 8 or size % 4:
            raise shared(UsageError(f"sizes={size}: bytes must be a multiple of 4, and 8 at least."))
        self._session, self._size = session, size
        self._strategy, self._replicas = session.strategy, session.strategy.num_replicas_in_sync
        pattern = np.arange(size // 4 - 1, dtype=np.float32) % 64
        self._right = pattern * (self._replicas * (self._replicas + 1) // 2)
        self._own = self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(pattern * (context.replica_id_in_sync_group + 1))
        )

        def reduce(own: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            first = 1.0 - (2.0 * self._replicas - 3.0) * count
            return sum_over_replicas([tf.where(tf.equal(replica, 0), first, 2.0 * count), own])

        def rounds(own: Any, number: tf.Tensor) -> tuple[Any, Any]:
            def body(i: tf.Tensor, count: Any, _: Any) -> tuple[Any, ...]:
                return i + 1, *self._strategy.run(reduce, args=(own, count))

            # Through the strategy, which gives the types that the body will give.
            start = self._strategy.run(lambda own: (tf.zeros([1]), tf.identity(own)), args=(own,))
            return tf.while_loop(lambda i, *_: i < number, body, (tf.constant(0), *start))[1:]

        with self._strategy.scope():
            self._compiled = tf.function(rounds, autograph=False).get_concrete_function(self._own, tf.constant(1))

    def enough(self) -> int:
        """How many rounds take so long that they can be timed."""
        self.block(2)  # the first rounds are slow
        number, most = 2, _MOST_COUNTED // self._replicas
        while (seconds := self.block(number)) < _BLOCK_SECONDS and number < most:
            wanted = math.ceil(1.2 * number * _BLOCK_SECONDS / seconds)
            number = min(max(wanted, 2 * number), 16 * number, most)
        return number

    def block(self, number: int) -> float:
        """Seconds of some rounds, on the slowest process. Ends as the processes meet, so that they begin together."""
        import tensorflow as tf

        start = time.perf_counter()
        count, total = self._compiled(self._own, tf.constant(number))
        seconds = time.perf_counter() - start
        told = self._session.channel.exchange("measuring all-reduces", [seconds, self._fault(count, total, number)])
        wrong = [f"{fault} on rank {rank}" for rank, (_, fault) in enumerate(told) if fault]
        if wrong:
            raise shared(
                EnvironmentProblem(
                    f"backend={self._session.backend!r} adds {self._size} bytes of {self._replicas} replicas wrongly: "
                    f"{wrong[0]}. Look at the network and at the MPI or NCCL that is installed."
                )
            )
        return max(seconds for seconds, _ in told)

    def _fault(self, count: Any, total: Any, number: int) -> str:
        """What is wrong with the sums of this process after some rounds; empty where nothing is."""
        local = self._strategy.experimental_local_results
        for value in local(count):
            if value.numpy().tolist() != [number]:
                return f"after {number} rounds the counter is {value.numpy().tolist()}"
        for value in local(total):
            wrong = np.flatnonzero(value.numpy() != self._right)
            if wrong.size:
                i = int(wrong[0])
                return f"{wrong.size} numbers, the first is {value.numpy()[i]} instead of {self._right[i]}"
        return ""


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        [int(n) for n in sys.argv[4].split(",")] if len(sys.argv) > 4 else SIZES,
    )
