#!/usr/bin/env bash
# Trains with one backend, setting up what it needs the first time:
#   launch/run.sh ddp|apex|horovod|accelerate|single [options]
#   launch/run.sh ddp|apex|horovod|accelerate --docker [options]      in its image instead
#   launch/run.sh contract BACKEND [options]
#   launch/run.sh compare | allreduce [--backends A,B,...] [options]
#   launch/run.sh report RECORD ... [options]
#   launch/run.sh doctor
# COMMAND --help lists the options of a command.
# LOCKSTEP_VENV names the virtual environment (default: .venv here; "active": the activated one),
# PYTHON the interpreter to make it with, LOCKSTEP_CACHE where wheels and tokenised texts are kept.
set -euo pipefail
export LOCKSTEP_STARTED_AT=${EPOCHREALTIME/,/.}
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"

case ${1:-} in
  single | ddp | apex | horovod | accelerate) extras=("$1") ;;
  '' | -h | --help | doctor | *:*) extras=(single) ;;
  contract)
    extras=(single)
    for word in "${@:2}"; do
      case $word in ddp | apex | horovod | accelerate) extras=("$word") ;; esac
    done
    ;;
  compare | allreduce)
    extras=(single ddp accelerate compare)
    # Everyone that can be had, unless some were named; Horovod must be built first.
    if [[ " $* " == *horovod* ]] ||
      { [[ " $* " != *" --backends"* ]] && command -v g++ >/dev/null && command -v cmake >/dev/null; }; then
      extras+=(horovod)
    fi
    ;;
  report) extras=(single compare) ;;
  *) fail "there is no '$1'; choose single, ddp, apex, horovod or accelerate; contract, compare, report, allreduce or doctor" ;;
esac
if [[ " $* " == *" --tracker"* ]]; then extras+=(tracking); fi
if [[ $# == 0 || " $* " == *" --help "* || " $* " == *" -h "* ]]; then
  find_environment
  # What can be told without setting up anything: the lines above.
  if [[ ! -x $environment/bin/lockstep && ${1:--h} == -* ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$root/launch/run.sh"
    exit $(($# ? 0 : 2))
  fi
  extras=(single)
elif [[ " $* " == *" --docker "* ]]; then
  [[ -f $root/docker/$1/Dockerfile ]] || fail "--docker: there is no image of '$1'; choose ddp, apex, horovod or accelerate"
  source "$root/launch/docker.sh"
  run_in_docker "$@"
fi
set_up "${extras[@]}"
# Ctrl-C waits until Python can answer it (launch/__main__.py): in its very start it would show a traceback.
patiently=()
if env --block-signal=INT true 2>/dev/null; then patiently=(env --block-signal=INT); fi
exec "${patiently[@]}" "$environment/bin/lockstep" "$@"
