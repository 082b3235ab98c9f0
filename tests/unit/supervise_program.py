"""Supervises stand-ins for `tfdist train`; started by test_supervise.py with the settings as JSON."""

from __future__ import annotations

import json
import sys

from tfdist.cluster import watch
from tfdist.cluster.hosts import hosts_of
from tfdist.cluster.launch import members
from tfdist.cluster.supervise import Launch, supervise

settings = json.loads(sys.argv[1])
watch.BACK_OFF_SECONDS = 0.05
watch.LEAVE_SECONDS = 1.0
hosts = hosts_of(settings.get("processes"), settings.get("hosts"), None)
sys.exit(
    supervise(
        Launch(
            hosts=hosts,
            members=members(hosts, settings.get("servers", 0)),
            argv=(sys.executable, *settings["argv"]),
            folder=settings["folder"],
            quiet=settings.get("quiet", True),
            rsh=tuple(settings.get("rsh", ["false"])),
            worker_restarts=settings.get("worker_restarts", 3),
            start_seconds=settings.get("start_seconds", 30.0),
        )
    )
)
