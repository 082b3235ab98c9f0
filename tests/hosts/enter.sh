#!/bin/bash
# enter.sh HOST COMMAND…: runs a shell command on a host of the lab that TFDIST_LAB and TFDIST_LAB_HOSTS name.
# An rsh agent for mpirun: like ssh, it needs the link, hands on nothing of the caller's environment, and starts at home.
host=$1
shift
if [ -z "$(ip -n "$TFDIST_LAB-switch" link show dev "$host" up)" ]; then
    echo "ssh: connect to host $host port 22: No route to host" >&2
    exit 255
fi
cd ~ || exit 1
exec env -i HOME=~ USER="$(id -un)" LANG="${LANG:-C.UTF-8}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    TFDIST_LAB="$TFDIST_LAB" TFDIST_LAB_HOSTS="$TFDIST_LAB_HOSTS" \
    "$(dirname "${BASH_SOURCE[0]}")/on_host.sh" "$host" /bin/bash -c "$*"
