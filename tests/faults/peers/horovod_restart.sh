#!/bin/bash
# horovod_restart.sh STARTS MPIRUN COMMAND…: two ranks on this machine, again until mpirun ends with 0.
starts=$1 mpirun=$2
shift 2
for _ in $(seq "$starts"); do
    "$mpirun" --oversubscribe -np 2 "$@" && exit 0
    echo "mpirun failed; starting again" >&2
    sleep 1
done
exit 1
