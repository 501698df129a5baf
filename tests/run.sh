#!/usr/bin/env bash
# Runs the project's tests, setting up everything they need the first time:
#   tests/run.sh [pytest options]         the short tests: what shows that this installation can be trusted
#   tests/run.sh --ci [pytest options]    those of continuous integration: all but what the same test shows of another backend
#   tests/run.sh --all [pytest options]   all of them; those that need what this machine lacks are skipped (CONTRIBUTING.md says what)
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../launch/setup.sh"
tests='not campaign and not exhaustive and not slow and not browser and not docker and not slurm and not kubernetes and not gpu'
case ${1:-} in
  --ci)
    shift
    tests='not campaign and not exhaustive'
    ;;
  --all)
    shift
    tests='not campaign'
    ;;
esac
mapfile -t backends < <(backend_names)
set_up "${backends[@]}" compare peers tracking test
cd "$root"
# Threads of a rank that wait for each other give their core away, since other tests have use for it. numpy and scipy start no
# threads: theirs would spin for a tenth of a second in each process that imports them.
export OMP_WAIT_POLICY=PASSIVE OPENBLAS_NUM_THREADS=1
# A file's tests stay together: they share what takes long to make. They wait more than they compute.
exec "$environment/bin/python" -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "$tests" "$@"
