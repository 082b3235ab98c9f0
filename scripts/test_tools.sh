#!/usr/bin/env bash
# Installs what some tests need, where root can: iproute2, SLURM's daemons and munge for those of several hosts and of
# SLURM, Chromium for those of pages. Run by `make test`; does nothing where all is there. Without them those tests skip
# and say why.
#
#   TFDIST_TEST_TOOLS=no       installs nothing
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin
say() { echo "tfdist: $*"; }

declare -A package_of=(
    [ip]=iproute2 [munged]=munge [slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client
)
missing=() browser=()
for command in ip munged slurmctld slurmd sbatch; do
    if ! command -v "$command" >/dev/null; then missing+=("${package_of[$command]}"); fi
done
if ! command -v chromium >/dev/null; then browser=(chromium); fi
if [ $((${#missing[@]} + ${#browser[@]})) -eq 0 ] || [ "${TFDIST_TEST_TOOLS:-yes}" = no ]; then exit 0; fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then exit 0; fi

# Debian's packages start their services unless this policy forbids it. One that is there already is left to decide.
log=$(mktemp)
policy=/usr/sbin/policy-rc.d
trap 'rm -f "$log"' EXIT
if [ ! -e "$policy" ]; then
    trap 'rm -f "$log" "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi

apt_install() {
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install --yes --no-install-recommends \
        -o DPkg::Lock::Timeout=120 "$@" >"$log" 2>&1 </dev/null
}

# install WHICH-TESTS PACKAGE…
install() {
    local tests=$1
    shift
    if [ $# -eq 0 ]; then return; fi
    say "installing $* for the tests of $tests (TFDIST_TEST_TOOLS=no make test leaves this out)"
    # The package lists may be missing or old: they are fetched only then.
    if ! apt_install "$@" && ! { timeout 120 apt-get update >/dev/null 2>&1 </dev/null && apt_install "$@"; }; then
        say "that failed, so those tests will skip ($(grep -m 1 '^E: ' "$log" || tail -n 1 "$log"))"
    fi
}

# Each by itself, so that where one cannot be had the other's tests run.
install "several hosts and of SLURM" "${missing[@]}"
install "pages in a browser" "${browser[@]}"

# Nor shall they start with the machine.
if command -v systemctl >/dev/null; then
    for service in munge slurmctld slurmd; do
        if [[ " ${missing[*]} " == *" $service "* ]]; then systemctl disable "$service" >/dev/null 2>&1 || true; fi
    done
fi
