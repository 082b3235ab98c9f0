#!/usr/bin/env bash
# Installs what the tests of several hosts and of SLURM need, where root can: iproute2, SLURM's daemons, munge.
# Run by `make test`; does nothing where all is there. Without them those tests skip and say why.
#
#   TFDIST_TEST_TOOLS=no       installs nothing
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin
say() { echo "tfdist: $*"; }

declare -A package_of=(
    [ip]=iproute2 [munged]=munge [slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client
)
missing=()
for command in ip munged slurmctld slurmd sbatch; do
    if ! command -v "$command" >/dev/null; then missing+=("${package_of[$command]}"); fi
done
if [ ${#missing[@]} -eq 0 ] || [ "${TFDIST_TEST_TOOLS:-yes}" = no ]; then exit 0; fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then exit 0; fi

say "installing ${missing[*]} for the tests of several hosts and of SLURM (TFDIST_TEST_TOOLS=no make test leaves them out)"

# Debian's packages start their services unless this policy forbids it. One that is there already is left to decide.
log=$(mktemp)
policy=/usr/sbin/policy-rc.d
trap 'rm -f "$log"' EXIT
if [ ! -e "$policy" ]; then
    trap 'rm -f "$log" "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi

install() {
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install --yes --no-install-recommends \
        -o DPkg::Lock::Timeout=120 "${missing[@]}" >"$log" 2>&1 </dev/null
}

# The package lists may be missing or old: they are fetched only then.
if ! install && ! { timeout 120 apt-get update >/dev/null 2>&1 </dev/null && install; }; then
    say "that failed, so those tests will skip ($(grep -m 1 '^E: ' "$log" || tail -n 1 "$log"))"
    exit 0
fi

# Nor shall they start with the machine.
if command -v systemctl >/dev/null; then
    for service in munge slurmctld slurmd; do
        if [[ " ${missing[*]} " == *" $service "* ]]; then systemctl disable "$service" >/dev/null 2>&1 || true; fi
    done
fi
