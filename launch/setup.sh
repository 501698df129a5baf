# shellcheck shell=bash
# Sourced by run.sh and tests/run.sh: installs extras of pyproject.toml into a virtual
# environment. A stamp of everything that the set-up depends on lets the next call skip it.

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)

fail() {
  echo "lockstep: $*" >&2
  exit 2
}

# note_start: the time of a run begins now, in seconds since 1970. Before version 5.0, bash has no EPOCHREALTIME.
note_start() {
  LOCKSTEP_STARTED_AT=${EPOCHREALTIME:-$(date +%s.%N)}
  LOCKSTEP_STARTED_AT=${LOCKSTEP_STARTED_AT/,/.} # some locales have a comma in it
}

# backend_names: the backends of this project, one a line: each has a file in backends/ and an extra in pyproject.toml.
backend_names() {
  local name
  for name in $(sed -n '/^\[project.optional-dependencies\]/,/^$/s/^\([a-z0-9_]*\) = .*/\1/p' "$root/pyproject.toml"); do
    [[ ! -f $root/backends/$name.py ]] || echo "$name"
  done
}

is_backend() {
  grep -qxF -- "$1" <<<"$(backend_names)"
}

# build_script BACKEND: the script that builds its package, if that is only available as source.
build_script() {
  echo "$root/backends/$1_build.sh"
}

# can_be_set_up BACKEND: fails if its package must be built and the tools for that are missing.
can_be_set_up() {
  [[ ! -x $(build_script "$1") ]] || (find_environment && check_python && check_tools "$1") 2>/dev/null
}

# check_tools EXTRA: fails, with a line that says what to install, if its package must be built and cannot be.
check_tools() {
  local script
  script=$(build_script "$1")
  [[ ! -x $script ]] || LOCKSTEP_CACHE=$(cache_directory) "$script" --check "$python"
}

# named_backends OPTIONS...: the words in the values of --backends and --entrant, some of which are names of backends.
named_backends() {
  local option value
  while (($#)); do
    option=${1%%=*} value=${1#*=}
    [[ $1 == *=* ]] || value=${2:-}
    [[ $option != --backends && $option != --entrant ]] || echo -n "${value//[,=:]/ } "
    shift
  done
}

# show_help COMMAND [OPTIONS...]: what the command prints with --help, from a file (see tests/help_texts.py).
show_help() {
  local help=$root/docs/help command=${1:-} words=" $* " engine name
  if [[ -z $command || $command == -* ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$root/launch/run.sh"
    echo "Backends: $(backend_names | paste -sd ' ')"
    return
  fi
  for engine in "$help"/engine-*.txt; do
    name=${engine##*/engine-}
    [[ $command == *:* ]] || is_backend "$command" || break # another command has an --engine of its own
    if [[ $words == *" --engine"[=\ ]"${name%.txt} "* ]]; then
      sed "s|BACKEND|$command|" "$engine"
      return
    fi
  done
  [[ $words != " forecast profile "* ]] || command=forecast-profile
  if [[ -f $help/$command.txt ]]; then
    cat "$help/$command.txt"
  else
    sed "0,/BACKEND/s||$command|" "$help/BACKEND.txt"
  fi
}

# set_up EXTRA...: installs the extras and sets `environment`.
set_up() {
  find_environment
  find_missing "$@"
  ((${#missing[@]})) || return 0

  check_python
  local extra
  for extra in "${missing[@]}"; do
    check_tools "$extra" || exit 2 # before packages are downloaded
  done
  mkdir -p "$environment/.lockstep" 2>/dev/null && [[ -w $environment/.lockstep ]] ||
    fail "$environment: lacks ${missing[*]} and cannot be written; leave out what needs it, or set LOCKSTEP_VENV to another directory"
  # One set-up at a time; a second one then finds nothing left to do.
  local lock log=$environment/.lockstep/setup.log
  exec {lock}>"$environment/.lockstep/lock"
  if command -v flock >/dev/null && ! flock --nonblock "$lock"; then
    echo "lockstep: waiting for another set-up of $environment" >&2
    flock "$lock"
    find_missing "$@"
  fi
  if ((${#missing[@]})); then
    echo "lockstep: setting up $environment for ${missing[*]} (minutes the first time; log: $log)" >&2
    if ! apart install "${missing[@]}" {terminal}>&2 >"$log" 2>&1; then
      tail -n 15 "$log" >&2
      echo "lockstep: the set-up failed; the whole log is $log" >&2
      exit 1
    fi
    mark_installed "${missing[@]}"
  fi
  exec {lock}>&-
  note_start # a run's time does not include its set-up
}

# find_missing EXTRA...: sets `missing` to those that are not installed as they should be.
find_missing() {
  local extra stamp
  missing=()
  for extra in "$@"; do
    stamp=$environment/.lockstep/$extra
    [[ -f $stamp && $(<"$stamp") == "$(setup_key "$extra")" && -x $environment/bin/lockstep && -x $environment/bin/python ]] ||
      missing+=("$extra")
  done
}

# apart COMMAND...: runs it in a process group of its own, which a signal to this script ends as a whole.
apart() {
  local status=0
  # Set before it starts: otherwise a signal right after the start would end this script only.
  trap 'interrupted 130' INT
  trap 'interrupted 143' TERM
  trap 'interrupted 129' HUP
  set -m
  "$@" </dev/null &
  set +m
  wait "$!" || status=$?
  trap - INT TERM HUP
  return "$status"
}

interrupted() {
  trap '' INT TERM HUP
  kill -TERM -- "-${!:-}" 2>/dev/null || true
  wait "${!:-}" 2>/dev/null || true
  # Standard output goes to the log here.
  echo "lockstep: the set-up was interrupted; the same command continues it" >&"$terminal"
  exit "$1"
}

# mark_installed EXTRA...: notes that they are installed, so that set_up skips them.
mark_installed() {
  local extra
  find_environment
  mkdir -p "$environment/.lockstep"
  for extra in "$@"; do
    setup_key "$extra" >"$environment/.lockstep/$extra"
  done
}

find_environment() {
  if [[ ${LOCKSTEP_VENV:-} == active ]]; then
    [[ -n ${VIRTUAL_ENV:-} ]] || fail "LOCKSTEP_VENV=active, but no virtual environment is activated"
    environment=$VIRTUAL_ENV
  else
    environment=$(absolute "${LOCKSTEP_VENV:-$root/.venv}")
  fi
}

# absolute PATH: with ~ as the home directory, which a shell leaves as it is inside quotes.
absolute() {
  local path=$1
  [[ $path != "~/"* ]] || path=~/${path:2}
  [[ $path == /* ]] || path=$PWD/$path
  echo "$path"
}

# Where wheels and tokenised texts are kept; tasks/cache.py follows the same rules.
cache_directory() {
  local shared=${XDG_CACHE_HOME:-}
  [[ $shared == /* ]] || shared=~/.cache
  absolute "${LOCKSTEP_CACHE:-$shared/lockstep}"
}

# setup_key EXTRA: a checksum of everything that its set-up depends on, such as which Python the environment's own is a link to.
setup_key() {
  local script
  script=$(build_script "$1")
  {
    cat "$root"/pyproject.toml "$root"/launch/{constraints.txt,setup.sh}
    echo "$root"
    readlink -f "$environment/bin/python" || true
    # Other packages do not depend on compilers, which come and go with `module load`.
    [[ ! -x $script ]] || { cat "$script" && command -v mpicxx nvcc || true; }
  } | cksum
}

# Sets `python` to the environment's own, or else to the one that will create it.
check_python() {
  python=$environment/bin/python
  if [[ ! -x $python ]]; then
    python=$(find_python)
  elif ! supported "$python"; then
    fail "$environment has $("$python" -V), Lockstep needs 3.10 to 3.13; remove it or set LOCKSTEP_VENV"
  elif ! "$python" -c 'import pip' 2>/dev/null; then
    [[ ${LOCKSTEP_VENV:-} != active ]] || fail "$environment has no pip; install it (python -m ensurepip)"
    python=$(find_python) # its creation was interrupted
  fi
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

# Failures are returned explicitly: bash ignores `set -e` in a function that is called from a condition.
install() {
  # A link to a Python that has been removed would stay.
  [[ -x $environment/bin/python ]] || rm -f "$environment"/bin/python*
  if [[ $python != "$environment/bin/python" ]] && ! "$python" -m venv "$environment"; then
    echo "$python cannot make a virtual environment (Debian: install python3-venv)"
    return 1
  fi
  local pip=("$environment/bin/python" -m pip install --disable-pip-version-check --no-compile)
  local constraints=$root/launch/constraints.txt options=() wheels list extra
  # An environment that came with its own torch, as vendors' images do, keeps it.
  if [[ ${LOCKSTEP_VENV:-} == active ]] && "$environment/bin/python" -c 'import torch' 2>/dev/null; then
    constraints=$environment/.lockstep/constraints.txt
    {
      grep -v '^torch==' "$root/launch/constraints.txt" &&
        "$environment/bin/python" -c 'import torch; print(f"torch=={torch.__version__}")'
    } >"$constraints" || return
  fi
  # torch first and alone, so that packages that depend on it find the pinned build.
  "${pip[@]}" -c "$constraints" "torch>=2.7.0a0" || return
  # Some packages have no wheel to download.
  for extra in "$@"; do
    if [[ -x $(build_script "$extra") ]]; then
      wheels=$(LOCKSTEP_CACHE=$(cache_directory) "$(build_script "$extra")" "$environment/bin/python") || return
      options+=(--find-links "$wheels" --only-binary "$extra")
    fi
  done
  list=$(IFS=, && echo "$*")
  "${pip[@]}" -c "$constraints" "${options[@]}" -e "${root}[$list]" || return
  # pip would compile one file after the other. Tests and models of other kinds are compiled if anybody imports them.
  "$environment/bin/python" -m compileall -q -j 0 -x 'site-packages/(.*/tests/|transformers/models/)' \
    "$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
}
