#!/usr/bin/env bash
# Trains with one backend, setting up what it needs the first time:
#   launch/run.sh BACKEND [options]
#   launch/run.sh BACKEND --docker [options]            in its image instead
#   launch/run.sh contract BACKEND [options]
#   launch/run.sh verify BACKEND [options]
#   launch/run.sh compare | allreduce [--backends A,B,...] [options]
#   launch/run.sh forecast --profile PROFILE --network NETWORK [options]
#   launch/run.sh forecast profile BACKEND [options]
#   launch/run.sh report RECORD | RACE | RESULTS ... [options]
#   launch/run.sh doctor
# COMMAND --help lists the options of a command.
# LOCKSTEP_VENV names the virtual environment (default: .venv here; "active": the activated one),
# PYTHON the interpreter to make it with, LOCKSTEP_CACHE where wheels and tokenised texts are kept.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
export LOCKSTEP_STARTED_AT
note_start

case ${1:-} in
  '' | -h | --help | doctor | *:*) extras=(single) ;;
  contract | verify | forecast)
    extras=(single)
    for word in "${@:2}"; do
      ! is_backend "$word" || extras=("$word")
    done
    [[ $1 != forecast ]] || extras+=(compare)
    ;;
  compare | allreduce)
    extras=(compare)
    words=" $(named_backends "$@") "
    for name in $(backend_names); do
      # The backends that are named, or else all that can be set up.
      if [[ " $* " == *" --backends"* ]]; then
        [[ $words != *" $name "* ]] || extras+=("$name")
      elif can_be_set_up "$name"; then
        extras+=("$name")
      fi
    done
    ;;
  report) extras=(single compare) ;;
  *)
    is_backend "$1" ||
      fail "there is no '$1'; choose a backend ($(backend_names | paste -sd ' ')) or contract, verify, compare, report, allreduce, forecast, doctor"
    extras=("$1")
    ;;
esac
if [[ " $* " == *" --tracker"* && " $* " != *" --tracker"[=\ ]"none "* ]]; then extras+=(tracking); fi
if [[ " $* " == *" --peers"* ]]; then extras+=(peers); fi
if [[ " $* " == *" --engine"[=\ ]"ray "* ]]; then extras+=(ray); fi
if [[ $# == 0 || " $* " == *" --help "* || " $* " == *" -h "* ]]; then
  find_environment
  find_missing "${extras[@]}"
  if [[ ! -x $environment/bin/lockstep || " ${missing[*]} " == *" compare "* ]]; then
    show_help "$@" # which needs nothing to be set up
    exit $(($# ? 0 : 2))
  fi
elif [[ " $* " == *" --docker "* ]]; then
  source "$root/launch/docker.sh"
  run_in_docker "$@"
else
  set_up "${extras[@]}"
fi
# Ctrl-C is blocked until Python can handle it (launch/__main__.py); before that, it would show a traceback.
patiently=()
if env --block-signal=INT true 2>/dev/null; then patiently=(env --block-signal=INT); fi
exec "${patiently[@]}" "$environment/bin/lockstep" "$@"
