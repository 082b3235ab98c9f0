#!/usr/bin/env bash
# oversubscribe.sh VENV: lets `mpirun -np 4` start on a machine with two cores, from within VENV alone.
# A user's own setting in the environment or on mpirun's command line wins.
#
# The policy names "slot", since without it Open MPI 5 maps by core once oversubscription is allowed: it then puts the
# ranks of several hosts, or of a SLURM job, on the first host.
set -euo pipefail
venv=$1

# Adds LINE to FILE unless it is there.
add_once() { grep -qxF "$2" "$1" || printf '%s\n' "$2" >>"$1"; }

# The Open MPI wheel reads this file of the environment.
if [ -e "$venv/etc/prte-mca-params.conf" ]; then
    sed -i '/^rmaps_default_mapping_policy = :oversubscribe$/d' "$venv/etc/prte-mca-params.conf" # from older set-ups
    add_once "$venv/etc/prte-mca-params.conf" "rmaps_default_mapping_policy = slot:oversubscribe"
    exit 0
fi

# A system's Open MPI reads no file of ours, so activation sets a default. Other MPIs need none.
case "$(mpirun --version 2>/dev/null | head -n 1)" in
    *"Open MPI) "[1-4].*) name=OMPI_MCA_rmaps_base_oversubscribe value=1 ;;
    *"Open MPI) "*) name=PRTE_MCA_rmaps_default_mapping_policy value=slot:oversubscribe ;;
    *) exit 0 ;;
esac
add_once "$venv/bin/activate" "export $name=\"\${$name:-$value}\""
