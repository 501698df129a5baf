#!/usr/bin/env bash
# Runs the project's tests, setting up everything they need the first time:
#   tests/run.sh [pytest options]         the short tests: what shows that this installation can be trusted
#   tests/run.sh --all [pytest options]   all of them; those that need a Docker engine, SLURM or a GPU are skipped where there is none
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../launch/setup.sh"
tests='not campaign and not slow and not browser and not docker and not slurm and not gpu'
if [[ ${1:-} == --all ]]; then
  shift
  tests='not campaign'
fi
mapfile -t backends < <(backend_names)
set_up "${backends[@]}" compare peers tracking test
cd "$root"
# A file's tests stay together: they share what takes long to make. They wait more than they compute.
exec "$environment/bin/python" -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "$tests" "$@"
