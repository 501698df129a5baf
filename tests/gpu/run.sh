#!/usr/bin/env bash
# The campaign on a machine with a GPU: every adapter held to the contract, then the race.
#   tests/gpu/run.sh [options]; --help lists them
# Apex is used where the environment has it (docs/results/README.md).
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../launch/setup.sh"
set_up single ddp accelerate peers compare test
(set_up horovod) || echo "Horovod could not be built; it is left out" >&2
cd "$root"
exec "$environment/bin/python" -m tests.gpu.campaign "$@"
