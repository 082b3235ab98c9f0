#!/bin/bash
# on_host.sh HOST COMMAND ARGS…: becomes a program on a host of the lab: its network, its name, its /etc/hosts.
exec nsenter --net="/run/netns/$TFDIST_LAB-$1" unshare --uts --mount /bin/bash -c '
    hostname "$0" && mount --bind "$TFDIST_LAB_HOSTS" /etc/hosts && exec "$@"' "$@"
