#!/usr/bin/env bash
# Trains with one backend, setting up what it needs the first time:
#   launch/run.sh ddp|apex|horovod|accelerate|single [options]
#   launch/run.sh ddp|apex|horovod|accelerate --docker [options]      in its image instead
#   launch/run.sh contract BACKEND [options]
#   launch/run.sh doctor
# LOCKSTEP_VENV names the virtual environment (default: .venv here; "active": the activated one),
# PYTHON the interpreter to make it with, LOCKSTEP_CACHE where wheels and tokenised texts are kept.
set -euo pipefail
export LOCKSTEP_STARTED_AT=${EPOCHREALTIME/,/.}
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case ${1:-} in
  single | ddp | apex | horovod | accelerate) extra=$1 ;;
  '' | -h | --help | doctor | *:*) extra=single ;;
  contract)
    extra=single
    for word in "${@:2}"; do
      case $word in ddp | apex | horovod | accelerate) extra=$word ;; esac
    done
    ;;
  *) fail "there is no backend '$1'; choose single, ddp, apex, horovod or accelerate; or contract, or doctor" ;;
esac
if [[ " $* " == *" --docker "* ]]; then
  [[ -f $root/docker/$1/Dockerfile ]] || fail "--docker: there is no image of '$1'; choose ddp, apex, horovod or accelerate"
  source "$root/launch/docker.sh"
  run_in_docker "$@"
fi
set_up "$extra"
exec "$environment/bin/lockstep" "$@"
