"""Who is chief, parameter server or worker, and what is said where the roles do not fit. By equality, no cluster."""

from __future__ import annotations

import json
import types

import pytest

from tfdist.cluster.channel import Alone
from tfdist.cluster.identity import Identity, identify
from tfdist.errors import EnvironmentProblem, UsageError
from tfdist.strategies import parameter_server
from tfdist.strategies.parameter_server import Cluster, cluster_of, open_parameter_server
from tfdist.strategies.table import Options, Place

ADDRESSES = ["a:1", "b:1", "c:1", "d:1", "e:1"]


@pytest.mark.parametrize(
    ("servers", "roles"),
    [
        (None, [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)]),
        (1, [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)]),
        (2, [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]),
        (3, [("chief", 0), ("ps", 0), ("ps", 1), ("ps", 2), ("worker", 0)]),
    ],
)
def test_ranks_have_roles(servers: int | None, roles: list[tuple[str, int]]) -> None:
    count = servers or 1
    for rank, (role, index) in enumerate(roles):
        assert cluster_of(Identity("mpi", rank, 5), ADDRESSES, servers) == Cluster(
            "a:1", tuple(ADDRESSES[1 : 1 + count]), tuple(ADDRESSES[1 + count :]), role, index
        )


ROLES = {"chief": ["a:1"], "ps": ["b:1", "c:1"], "worker": ["d:1", "e:1", "f:1"]}


def told(cluster: dict[str, list[str]], kind: str = "worker", index: int = 0) -> Identity:
    return identify({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})})


@pytest.mark.parametrize(("kind", "index"), [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 2)])
@pytest.mark.parametrize("servers", [None, 2])
def test_tf_config_gives_roles_itself(kind: str, index: int, servers: int | None) -> None:
    cluster = cluster_of(told(ROLES, kind, index), [], servers)
    assert cluster == Cluster("a:1", ("b:1", "c:1"), ("d:1", "e:1", "f:1"), kind, index)
    assert cluster.spec.as_dict() == ROLES


@pytest.mark.parametrize(
    ("missing", "numbers"),
    [
        ("chief", "0 chief, 2 'ps' and 3 'worker'"),
        ("ps", "1 chief, 0 'ps' and 3 'worker'"),
        ("worker", "1 chief, 2 'ps' and 0 'worker'"),
    ],
)
def test_a_role_that_tf_config_leaves_out(missing: str, numbers: str) -> None:
    left = {role: members for role, members in ROLES.items() if role != missing}
    with pytest.raises(UsageError) as caught:
        cluster_of(told(left, next(iter(left))), [], None)
    assert str(caught.value) == (
        f"TF_CONFIG has {numbers} task(s), but backend='parameter_server' needs a chief and at least one of "
        "both others."
    )


def test_another_number_of_servers_than_tf_config_has() -> None:
    with pytest.raises(UsageError) as caught:
        cluster_of(told(ROLES), [], 1)
    assert str(caught.value) == "parameter_servers=1, but TF_CONFIG names 2. Leave parameter_servers out."


@pytest.mark.parametrize(("processes", "servers"), [(1, None), (2, 1), (3, 2), (4, 3)])
def test_too_few_processes_for_the_roles(processes: int, servers: int | None) -> None:
    place = Place(Identity("mpi", 0, processes), Alone(), 1, 1, Options(parameter_servers=servers))
    count = servers or 1
    with pytest.raises(UsageError) as caught:
        open_parameter_server(place)
    assert str(caught.value) == (
        f"backend='parameter_server' with parameter_servers={count} needs at least {count + 2} processes (a chief, "
        f"{count} server(s), a worker), and there are {processes}. Start more, as with: mpirun -np {count + 3} python "
        f"…, or: tfdist launch --processes {count + 3} -- …"
    )


def test_those_that_did_not_come_are_told_by_their_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_START_SECONDS", "7")
    cluster = cluster_of(told(ROLES, "chief"), [], None)
    assert parameter_server._missing(cluster, {"c:1": "timed out", "d:1": "Connection refused"}) == (
        "parameter server 1 (c:1: timed out), worker 0 (d:1: Connection refused) did not come within 7 s. Look at the "
        "output of that process, and whether this host reaches that one; TFDIST_START_SECONDS sets how long to wait."
    )


class TestWatching:
    """What a server does whose chief may come late, stay and leave."""

    @staticmethod
    def looks(there: list[bool | str], monkeypatch: pytest.MonkeyPatch) -> int:
        """How many looks it took, of a chief that is there or not at each, or not for another reason than a refusal."""
        answers = iter(there)
        seen: list[float] = []
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        def unreachable(addresses: list[str], seconds: float, *, serving: bool) -> dict[str, str]:
            assert (addresses, serving) == (["a:1"], True)
            seen.append(seconds)
            answer = next(answers)
            return {} if answer is True else {"a:1": answer or "Connection refused"}

        monkeypatch.setattr(parameter_server, "unreachable", unreachable)
        monkeypatch.setattr(parameter_server, "time", types.SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
        parameter_server._watch("a:1")
        assert seen[0] > 0 == sum(seen[1:]), "only the first look waits"
        return len(seen)

    @pytest.mark.parametrize("before", [[], [True] * 3, [False] * 4 + [True], [False, True] * 9], ids=str)
    def test_it_ends_once_the_chief_has_not_listened_five_times_in_a_row(
        self, before: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        there = [True, *before, *[False] * 5]
        assert self.looks([*there, True], monkeypatch) == len(there)

    def test_a_network_that_is_away_for_a_while_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        there: list[bool | str] = [True, *["timed out"] * 50, True, *["No route to host"] * 50, True, *[False] * 5]
        assert self.looks([*there, True], monkeypatch) == len(there)

    def test_a_chief_that_says_nothing_for_long_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(EnvironmentProblem, match=r"the chief \(a:1\) has not answered for 60 s"):
            self.looks([True, *["timed out"] * 100], monkeypatch)

    def test_a_chief_that_never_comes_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TFDIST_START_SECONDS", "7")
        with pytest.raises(EnvironmentProblem) as caught:
            self.looks([False], monkeypatch)
        assert str(caught.value) == (
            "the chief (a:1) did not come within 7 s. Look at its output, and whether this host reaches that one; "
            "TFDIST_START_SECONDS sets how long to wait."
        )
