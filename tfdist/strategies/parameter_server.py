"""TensorFlow's parameter servers: who is chief, server or worker, and how each of them starts and ends.

    rank 0          the chief: makes the variables, hands out steps, evaluates, prints and writes
    ranks 1 … P     parameter servers: hold the variables
    the others      workers: compute

Servers and workers run TensorFlow's server and nothing of ours until the chief leaves. Under MPI and SLURM they know by
their channel; by TF_CONFIG they have none, since any of them may be started again, and watch whether the chief listens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import socket
import sys
import time
from collections.abc import Callable

import tensorflow as tf

from tfdist.cluster.channel import Channel
from tfdist.cluster.devices import assigned, show_gpus
from tfdist.cluster.ending import end_together
from tfdist.cluster.identity import Identity
from tfdist.cluster.ports import hold_port, meet, past_proxies, require_reachable, unreachable
from tfdist.cluster.tcp_channel import START_SECONDS, start_seconds
from tfdist.errors import EnvironmentProblem, UsageError
from tfdist.strategies.table import Place

__all__ = ["Cluster", "ParameterServer", "cluster_of", "open_parameter_server"]

_WATCH_SECONDS = 1.0
_GONE_AFTER = 5  # times in a row that the chief's host refused the connection
_SILENT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses (`host:port`) of all processes by their roles, and this process's place among them."""

    chief: str
    servers: tuple[str, ...]
    workers: tuple[str, ...]
    role: str
    index: int

    def role_of(self, rank: int) -> str:
        """As in `worker 1`."""
        role, index = _role(rank, len(self.servers))
        return f"{role} {index}"

    @property
    def own(self) -> str:
        """This process's address."""
        return {"chief": (self.chief,), "ps": self.servers, "worker": self.workers}[self.role][self.index]

    @property
    def spec(self) -> tf.train.ClusterSpec:
        """As TensorFlow has it."""
        return tf.train.ClusterSpec({"chief": [self.chief], "ps": list(self.servers), "worker": list(self.workers)})


class ParameterServer(tf.distribute.ParameterServerStrategy):
    """`tf.distribute.ParameterServerStrategy` that knows its cluster."""

    def __init__(self, cluster: Cluster, gpus: int) -> None:
        self.cluster = cluster
        super().__init__(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                cluster.spec,
                task_type="chief",
                task_id=0,
                rpc_layer="grpc",
                num_accelerators={"GPU": gpus} if gpus else {},
            )
        )


def open_parameter_server(place: Place) -> ParameterServer | Callable[[], None]:
    """Open the strategy on the chief. On the others: what serves until the chief has gone.

    Raises:
        UsageError: there are too few processes for the roles.
        EnvironmentProblem: some process did not come in time, or cannot be reached.
    """
    identity, channel = place.identity, place.channel
    gpus = tf.config.list_physical_devices("GPU")
    with contextlib.ExitStack() as until_open:
        if identity.tf_config is None:
            _check_size(identity, place.options.parameter_servers or 1)
            held = until_open.enter_context(hold_port())
            addresses = meet(channel, "opening parameter_server", held.getsockname()[1])
        else:
            addresses = list(identity.tf_config.members)
        cluster = cluster_of(identity, addresses, place.options.parameter_servers)
        past_proxies(addresses)
        if identity.tf_config is None:
            require_reachable(channel, addresses)
        if cluster.role != "chief":
            own = _own_gpus(gpus, identity, channel, cluster) if cluster.role == "worker" else []
            server = _start_server(cluster, place, own)
            channel.exchange("the servers are up", None)
            return lambda: _serve(server, cluster, channel)
        if identity.tf_config is None and gpus:
            _own_gpus(gpus, identity, channel, cluster)
        channel.exchange("the servers are up", None)
        missing = unreachable([*cluster.servers, *cluster.workers], start_seconds(), serving=True)
        if missing:
            raise EnvironmentProblem(_missing(cluster, missing))
        show_gpus([], grow=True)  # the chief only evaluates, beside a worker on its host
        strategy = ParameterServer(cluster, 1 if gpus else 0)
    end_together(channel)
    return strategy


def cluster_of(identity: Identity, addresses: list[str], servers: int | None) -> Cluster:
    """Who does what, from the ranks, or from the roles that TF_CONFIG gives.

    Args:
        servers: how many parameter servers were asked for.

    Raises:
        UsageError: a role is not there, or TF_CONFIG has another number of servers.
    """
    config = identity.tf_config
    if config is None:
        count = servers or 1
        role, index = _role(identity.rank, count)
        return Cluster(addresses[0], tuple(addresses[1 : count + 1]), tuple(addresses[count + 1 :]), role, index)
    workers = config.workers[1:] if config.has_chief else config.workers
    if not config.has_chief or not config.servers or not workers:
        raise UsageError(
            f"TF_CONFIG has {int(config.has_chief)} chief, {len(config.servers)} 'ps' and {len(workers)} 'worker' "
            "task(s), but backend='parameter_server' needs a chief and at least one of both others."
        )
    if servers not in (None, len(config.servers)):
        raise UsageError(
            f"parameter_servers={servers}, but TF_CONFIG names {len(config.servers)}. Leave parameter_servers out."
        )
    return Cluster(config.workers[0], config.servers, workers, config.task_type, config.task_index)


def _role(rank: int, servers: int) -> tuple[str, int]:
    if rank == 0:
        return "chief", 0
    return ("ps", rank - 1) if rank <= servers else ("worker", rank - servers - 1)


def _check_size(identity: Identity, servers: int) -> None:
    if identity.size < servers + 2:
        raise UsageError(
            f"backend='parameter_server' with parameter_servers={servers} needs at least {servers + 2} processes (a "
            f"chief, {servers} server(s), a worker), and there are {identity.size}. Start more, as with: "
            f"mpirun -np {servers + 3} python …, or: tfdist launch --processes {servers + 3} -- …"
        )


def _own_gpus(gpus: list[object], identity: Identity, channel: Channel, cluster: Cluster) -> list[int]:
    """The number of this worker's GPU, in a list; empty without GPUs. All ranks of a channel call it."""
    if not gpus:
        return []
    host = socket.gethostname()
    here = [rank for rank, name in enumerate(channel.exchange("placing workers", host)) if name == host]
    workers = [rank for rank in here if rank > len(cluster.servers)] if channel.size > 1 else [identity.rank]
    if cluster.role != "worker":
        return []
    place = workers.index(identity.rank)
    visible = [os.environ.get("CUDA_VISIBLE_DEVICES")] * len(workers)
    return assigned(list(range(len(gpus))), place, len(workers), 1, visible=visible, host=host)


def _start_server(cluster: Cluster, place: Place, gpus: list[int]) -> tf.distribute.Server:
    # An operation that waits for another process holds a thread: with too few, the servers wait for each other.
    threads = max(8, 2 * (len(cluster.workers) + len(cluster.servers)))
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=place.threads,
        inter_op_parallelism_threads=threads,
        device_count={} if gpus else {"GPU": 0},
        gpu_options={
            "visible_device_list": ",".join(map(str, gpus)),
            "allow_growth": place.options.gpu_memory == "grow",
        },
    )
    try:
        return tf.distribute.Server(
            cluster.spec, job_name=cluster.role, task_index=cluster.index, protocol="grpc", config=config, start=True
        )
    except tf.errors.OpError as error:
        raise EnvironmentProblem(
            f"{cluster.role} {cluster.index} cannot listen at its address {cluster.own}: "
            f"{str(error).splitlines()[0]}. End what listens there, or give it another port."
        ) from None


def _serve(server: tf.distribute.Server, cluster: Cluster, channel: Channel) -> None:
    if channel.size > 1:
        end_together(channel)(math.inf)
    else:
        _watch(cluster.chief)
    sys.stdout.flush()
    sys.stderr.flush()
    del server


def _watch(chief: str) -> None:
    """Until the chief, which must come in time, listens no longer."""
    if unreachable([chief], start_seconds(), serving=True):
        raise EnvironmentProblem(
            f"the chief ({chief}) did not come within {start_seconds():g} s. Look at its output, and whether this host "
            f"reaches that one; {START_SECONDS} sets how long to wait."
        )
    refused, seen = 0, time.monotonic()
    while refused < _GONE_AFTER and time.monotonic() - seen < _SILENT_SECONDS:
        time.sleep(0.2 if refused else _WATCH_SECONDS)
        reason = unreachable([chief], 0.0, serving=True).get(chief)
        if reason is None:
            refused, seen = 0, time.monotonic()
        else:  # a host whose process has ended refuses; one that a network hides for a while says nothing
            refused = refused + 1 if reason == os.strerror(errno.ECONNREFUSED) else 0
    if refused < _GONE_AFTER:
        raise EnvironmentProblem(f"the chief ({chief}) has not answered for {_SILENT_SECONDS:g} s.")


def _missing(cluster: Cluster, reasons: dict[str, str]) -> str:
    names = {address: f"worker {i}" for i, address in enumerate(cluster.workers)}
    names |= {address: f"parameter server {i}" for i, address in enumerate(cluster.servers)}
    absent = ", ".join(f"{names[address]} ({address}: {reason})" for address, reason in reasons.items())
    return (
        f"{absent} did not come within {start_seconds():g} s. Look at the output of that process, and whether this "
        f"host reaches that one; {START_SECONDS} sets how long to wait."
    )
