"""A SLURM of the tests' own: a controller and node daemons on the hosts of a lab, with their own munge.

It shares nothing with a SLURM that the machine may have: keys, sockets, ports and files are in a folder of its own.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.hosts.netlab import Lab, lab, need
from tests.jobs import LIMIT, ROOT, Ended, Job

__all__ = ["Slurm", "slurm"]


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A running SLURM. Commands are given on its first host, the login node, which runs no jobs."""

    lab: Lab
    folder: Path
    nodes: tuple[str, ...]

    def sbatch(
        self,
        script: str | Path,
        *args: object,
        flags: Sequence[object] = (),
        timeout: float = LIMIT,
        env: Mapping[str, str] | None = None,
    ) -> Ended:
        """`sbatch script args` in the repository's folder: the job's exit code and output, after its end."""
        output = self.folder / f"job-{time.monotonic_ns()}.txt"
        where = ["--parsable", f"--chdir={ROOT}", f"--output={output}", f"--error={output}"]
        submitted = self.run("sbatch", *where, *flags, script, *args, env=env)
        if submitted.code:
            return submitted
        job = submitted.output.split()[-1]
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:  # `sbatch --wait` looks every 32 s only
            about = self.run("scontrol", "show", "--oneliner", "job", job).check().output
            fields = dict(field.split("=", 1) for field in about.split() if "=" in field)
            if fields["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                code, number = map(int, fields["ExitCode"].split(":"))
                return Ended(code or -number, output.read_text())
            time.sleep(0.2)
        self.run("scancel", "--full", "--signal=KILL", job)
        return Ended(124, f"{output.read_text()}\nended by the test after {timeout} s")

    def srun(self, *args: object, timeout: float = LIMIT, env: Mapping[str, str] | None = None) -> Ended:
        """`srun args`."""
        return self.run("srun", *args, timeout=timeout, env=env)

    def salloc(self, *args: object, timeout: float = LIMIT, env: Mapping[str, str] | None = None) -> Ended:
        """`salloc args`: the flags, then a command, which runs on the login node."""
        return self.run("salloc", *args, timeout=timeout, env=env)

    def run(self, *command: object, timeout: float = LIMIT, env: Mapping[str, str] | None = None) -> Ended:
        """Any command on the login node."""
        return self.lab.run(self.lab.hosts[0], command, timeout, {**self.variables(), **(env or {})})

    def variables(self) -> dict[str, str]:
        """By which SLURM's programs find this one."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}


@contextmanager
def slurm(folder: Path, nodes: int = 2, cpus: int = 2) -> Iterator[Slurm]:
    """A SLURM with `nodes` nodes that each claim `cpus` processors, ready for jobs; its files are in `folder`."""
    need("ip", "munged", "slurmctld", "slurmd", "sbatch")
    with lab(1 + nodes) as hosts:
        made = Slurm(hosts, folder, hosts.hosts[1:])
        for name in ("munge", "state", "log", *(f"spool/{node}" for node in made.nodes)):
            (folder / name).mkdir(mode=0o755, parents=True)
        (folder / "slurm.conf").write_text(_configuration(made, cpus))
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        daemons: list[Job] = []
        try:
            daemons.append(_munge(made))
            daemons.append(_daemon(made, hosts.hosts[0], "slurmctld", "-D"))
            daemons += [_daemon(made, node, "slurmd", "-D") for node in made.nodes]
            _wait_until_idle(made)
            yield made
        finally:
            for daemon in reversed(daemons):
                daemon.finish(0)


def _configuration(slurm: Slurm, cpus: int) -> str:
    folder, hosts = slurm.folder, slurm.lab
    lines = [
        "ClusterName=tfdist",
        f"SlurmctldHost={hosts.hosts[0]}({hosts.addresses[0]})",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld",
        f"SlurmdLogFile={folder}/log/slurmd-%n",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmdParameters=config_overrides",
        "KillWait=5",
        *(
            f"NodeName={host} NodeAddr={address} CPUs={cpus}"
            for host, address in zip(hosts.hosts[1:], hosts.addresses[1:], strict=True)
        ),
        f"PartitionName=tests Nodes={','.join(slurm.nodes)} Default=YES MaxTime=10",
    ]
    return "\n".join(lines) + "\n"


def _munge(slurm: Slurm) -> Job:
    """One munged for all hosts: its socket is a file, which they share."""
    folder = slurm.folder / "munge"
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    flags = [f"--{flag}={folder / name}" for flag, name in files.items()]
    return _daemon(slurm, slurm.lab.hosts[0], "munged", "--foreground", "--force", *flags)


def _daemon(slurm: Slurm, host: str, *command: str) -> Job:
    """Start a daemon in the foreground, so that it can be ended."""
    return slurm.lab.start(host, command, {**slurm.variables(), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"})


def _wait_until_idle(slurm: Slurm, seconds: float = 120) -> None:
    """Wait until every node takes jobs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        states = slurm.run("sinfo", "--noheader", "--Node", "--format=%N %T", timeout=60)
        if states.output.split("\n")[:-1] == [f"{node} idle" for node in slurm.nodes]:
            return
        time.sleep(0.1)
    logs = "\n".join(f"{path}: {path.read_text()[-2000:]}" for path in sorted((slurm.folder / "log").iterdir()))
    raise TimeoutError(f"SLURM's nodes are not idle after {seconds} s\n{states.output}\n{logs}")
