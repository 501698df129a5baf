#!/usr/bin/env bash
# What a container starts: the image's backend with the shared options of LOCKSTEP_OPTIONS, then its own;
# or `doctor`, or `contract`. Results go to the directory mounted at /runs (LOCKSTEP_RUNS), and belong to
# whoever that directory belongs to: started as root, this becomes its owner first.
set -euo pipefail
runs=${LOCKSTEP_RUNS:-/runs}
if ((EUID == 0)) && [[ $(stat -c %u "$runs") != 0 ]]; then
  exec setpriv --reuid "$(stat -c %u "$runs")" --regid "$(stat -c %g "$runs")" --clear-groups --no-new-privs "$0" "$@"
fi
if [[ ! -w $runs ]]; then
  echo "lockstep: $runs is not writable for user $EUID of the container; give it to that user," \
    "or start with --user $(stat -c %u:%g "$runs")" >&2
  exit 2
fi
cd "$(dirname "$runs")"
case ${1:-} in
  doctor | contract) exec /opt/lockstep/launch/run.sh "$@" ;;
esac
read -ra shared <<<"${LOCKSTEP_OPTIONS:-}"
exec /opt/lockstep/launch/run.sh "$LOCKSTEP_BACKEND" "${shared[@]}" "$@"
