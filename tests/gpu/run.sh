#!/usr/bin/env bash
# Everything that wants a GPU: the tests marked gpu that are no contracts, then contracts and race.
#   tests/gpu/run.sh [options of the campaign]; --help lists them
# Apex is used where the environment has it: LOCKSTEP_VENV=active inside NVIDIA's image, for example.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/setup.sh"
set_up single ddp accelerate test
(set_up horovod) || echo "Horovod could not be built; it is left out" >&2
cd "$root"
exec "$environment/bin/python" -m tests.gpu.campaign "$@"
