#!/usr/bin/env bash
# Makes the images that the tests use, one process at a time; what is there and up to date is left alone.
# LOCKSTEP_BASE_IMAGE names the base; without it, one is made of Debian's packages.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/setup.sh"
source "$root/launch/docker.sh"
exec {lock}>"${TMPDIR:-/tmp}/lockstep-images.lock"
flock "$lock"
if [[ -z ${LOCKSTEP_BASE_IMAGE:-} ]]; then
  export LOCKSTEP_BASE_IMAGE=local/python:3.11-slim
  docker image inspect "$LOCKSTEP_BASE_IMAGE" >/dev/null 2>&1 || "$root/docker/base_image.sh" "$LOCKSTEP_BASE_IMAGE"
fi
for backend in $(images); do
  grep -qx cpu <<<"$(variants "$backend")" || continue
  SECONDS=0
  ensure_image "$backend" "lockstep/$backend:$version"
  size=$(docker image inspect --format '{{.Size}}' "lockstep/$backend:$version")
  awk -v name="$backend" -v seconds=$SECONDS -v size="$size" 'BEGIN { printf "%s: %d s, %.2f GiB\n", name, seconds, size / 2^30 }'
done
