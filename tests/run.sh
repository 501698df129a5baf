#!/usr/bin/env bash
# Runs the project's tests, setting up everything they need the first time: tests/run.sh [pytest options]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup.sh"
set_up single ddp horovod accelerate compare tracking test
cd "$root"
# A file's tests stay together: they share what takes long to make. They wait more than they compute.
exec "$environment/bin/python" -m pytest --numprocesses 2 --dist loadfile "$@"
