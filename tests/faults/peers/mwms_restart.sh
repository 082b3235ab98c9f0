#!/bin/bash
# mwms_restart.sh STARTS PORT0 PORT1 COMMAND…: two workers on this machine, again until both end with 0.
starts=$1 workers="\"127.0.0.1:$2\", \"127.0.0.1:$3\""
shift 3
for _ in $(seq "$starts"); do
    pids=()
    for index in 0 1; do
        TF_CONFIG="{\"cluster\": {\"worker\": [$workers]}, \"task\": {\"type\": \"worker\", \"index\": $index}}" "$@" &
        pids+=($!)
    done
    failed=0
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    [ $failed = 0 ] && exit 0
    echo "a worker failed; starting again" >&2
    sleep 1
done
exit 1
