"""How the processes of a job talk: the channel follows from who started them."""

from __future__ import annotations

import pytest

from tfdist.cluster.identity import Identity, SlurmStep, TfConfig
from tfdist.strategies import session

TWO = TfConfig(("a:1", "b:1"), 0, "worker", 0)
SERVERS = TfConfig(("a:1", "b:1"), 0, "chief", 0, servers=("c:1",), has_chief=True)


@pytest.mark.parametrize(
    ("identity", "channel"),
    [
        (Identity("alone"), "alone"),
        (Identity("mpi", 0, 1), "mpi"),
        (Identity("mpi", 0, 2), "mpi"),
        (Identity("mpi", 0, 2, tf_config=TWO), "mpi"),
        (Identity("mpi", 0, 3, tf_config=SERVERS), "mpi"),
        (Identity("tf_config", 0, 1, tf_config=TfConfig(("a:1",), 0, "worker", 0)), "alone"),
        (Identity("tf_config", 0, 2, tf_config=TWO), "tcp"),
        # Any of them may be started again while the others go on.
        (Identity("tf_config", 0, 3, tf_config=SERVERS), "alone"),
        (Identity("slurm", 0, 2, slurm=SlurmStep("7.0", "node1")), "tcp"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.launcher} {value.size}",
)
def test_the_channel_of_a_job(identity: Identity, channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "open_mpi", lambda given: ("mpi", given))
    monkeypatch.setattr(session, "open_tcp", lambda given: ("tcp", given))
    opened = session._channel(identity)
    assert opened is session._alone if channel == "alone" else opened == (channel, identity)
