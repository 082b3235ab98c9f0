"""Supervises stand-ins for `tfdist train`; started by launched.py with the settings as JSON."""

from __future__ import annotations

import json
import sys

from tfdist.cluster import mpirun, restarts, watch
from tfdist.cluster.hosts import hosts_of
from tfdist.cluster.supervise import Launch, supervise

settings = json.loads(sys.argv[1])
watch.BACK_OFF_SECONDS = restarts.BACK_OFF_SECONDS = settings.pop("back_off", 0.05)
watch.LEAVE_SECONDS = 1.0
mpirun.ABORT_SECONDS = 2.0
hosts = hosts_of(settings.pop("processes", None), settings.pop("hosts", None), None)
program = settings.pop("mpirun", None)
given = {
    "argv": (sys.executable, *settings.pop("argv")),
    "quiet": settings.pop("quiet", True),
    "rsh": tuple(settings.pop("rsh", ["false"])),
    "start_seconds": settings.pop("start_seconds", 30.0),
}
mpi = mpirun.Mpi(program, mpirun.version_of(program), given["rsh"]) if program else None
sys.exit(supervise(Launch(hosts=hosts, mpi=mpi, **given, **settings)))
