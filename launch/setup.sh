# shellcheck shell=bash
# Sourced by run.sh and tests/run.sh: makes a virtual environment hold what some extras of
# pyproject.toml need. A stamp of all that the set-up depends on makes the next call immediate.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "lockstep: $*" >&2
  exit 2
}

# set_up EXTRA...: installs the extras and sets `environment`.
set_up() {
  local extra stamp wanted missing=()
  find_environment
  wanted=$(setup_key)
  for extra in "$@"; do
    stamp=$environment/.lockstep/$extra
    [[ -f $stamp && $(<"$stamp") == "$wanted" && -x $environment/bin/lockstep ]] || missing+=("$extra")
  done
  ((${#missing[@]})) || return 0

  # One set-up at a time; the second finds the work of the first done.
  if [[ -z ${LOCKSTEP_SETUP_LOCKED:-} ]] && command -v flock >/dev/null; then
    exec {lock}>"${TMPDIR:-/tmp}/lockstep-$(id -u)-$(cksum <<<"$environment" | cut -d ' ' -f 1).lock"
    flock "$lock"
    LOCKSTEP_SETUP_LOCKED=1 set_up "$@"
    exec {lock}>&-
    return
  fi
  make_environment
  local log=$environment/.lockstep/setup.log
  echo "lockstep: setting up $environment for ${missing[*]} (minutes the first time; log: $log)" >&2
  if ! install "${missing[@]}" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    echo "lockstep: the set-up failed; the whole log is $log" >&2
    exit 1
  fi
  mark_installed "${missing[@]}"
  LOCKSTEP_STARTED_AT=${EPOCHREALTIME/,/.} # a run's time does not include its set-up
}

# mark_installed EXTRA...: lets set_up find nothing to do for them.
mark_installed() {
  local extra
  find_environment
  mkdir -p "$environment/.lockstep"
  for extra in "$@"; do
    setup_key >"$environment/.lockstep/$extra"
  done
}

find_environment() {
  if [[ ${LOCKSTEP_VENV:-} == active ]]; then
    [[ -n ${VIRTUAL_ENV:-} ]] || fail "LOCKSTEP_VENV=active, but no virtual environment is activated"
    environment=$VIRTUAL_ENV
  else
    environment=${LOCKSTEP_VENV:-$root/.venv}
  fi
}

# Of all that the result depends on.
setup_key() {
  cat "$root"/pyproject.toml "$root"/launch/{constraints.txt,setup.sh,build_horovod.sh} <(echo "$root" && command -v mpicxx nvcc) | cksum
}

make_environment() {
  local python
  if [[ ! -x $environment/bin/python ]]; then
    python=$(find_python)
    "$python" -m venv "$environment" || fail "$python cannot make a virtual environment (Debian: install python3-venv)"
  fi
  supported "$environment/bin/python" ||
    fail "$environment has $("$environment/bin/python" -V), Lockstep needs 3.10 to 3.13; remove it or set LOCKSTEP_VENV"
  mkdir -p "$environment/.lockstep"
}

supported() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null
}

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    supported "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1 || true); Lockstep needs Python 3.10 to 3.13"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if supported "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.10 to 3.13 on PATH (python3 is $(python3 -V 2>&1 || true)); name one with PYTHON=..."
}

# Its failures are passed on by hand: bash ignores `set -e` in a function called from a condition.
install() {
  local pip=("$environment/bin/python" -m pip install --disable-pip-version-check)
  local constraints=$root/launch/constraints.txt options=() wheels list
  # An environment that came with its own torch, as vendors' images do, keeps it.
  if [[ ${LOCKSTEP_VENV:-} == active ]] && "$environment/bin/python" -c 'import torch' 2>/dev/null; then
    constraints=$environment/.lockstep/constraints.txt
    {
      grep -v '^torch==' "$root/launch/constraints.txt" &&
        "$environment/bin/python" -c 'import torch; print(f"torch=={torch.__version__}")'
    } >"$constraints" || return
  fi
  # torch first and alone: whatever else asks for it must find the pinned build.
  "${pip[@]}" -c "$constraints" "torch>=2.7.0a0" || return
  if [[ " $* " == *" horovod "* ]]; then
    wheels=$("$root/launch/build_horovod.sh" "$environment/bin/python") || return
    options=(--find-links "$wheels" --only-binary horovod)
  fi
  list=$(IFS=, && echo "$*")
  "${pip[@]}" -c "$constraints" "${options[@]}" -e "${root}[$list]"
}
