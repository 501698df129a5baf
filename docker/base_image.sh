#!/usr/bin/env bash
# Makes a base image much like python:3.11-slim from Debian's packages, where none can be pulled:
#   docker/base_image.sh IMAGE        (as root; needs debootstrap and a running engine)
# What pip and TLS are told on this machine (local package folders, certificates) holds inside, too.
set -euo pipefail

fail() {
  echo "base_image: $*" >&2
  exit 2
}

(($# == 1)) || fail "usage: docker/base_image.sh IMAGE"
image=$1
((EUID == 0)) || fail "debootstrap wants to be root; run it with sudo"
for tool in debootstrap docker python3; do
  command -v $tool >/dev/null || fail "$tool is not installed (Debian: apt-get install debootstrap docker.io python3)"
done
docker version >/dev/null 2>&1 || fail "no Docker engine answers; start it"

work=$(mktemp -d "${TMPDIR:-/var/tmp}/lockstep-base.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/rootfs
debootstrap --variant=minbase \
  --include=ca-certificates,python3,python3-pip,python3-venv bookworm "$root" >"$work/log" 2>&1 ||
  { tail -n 5 "$work/log" >&2 && fail "debootstrap failed"; }
ln -s python3 "$root/usr/bin/python"
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED

# Certificates of this machine's own.
if compgen -G '/usr/local/share/ca-certificates/*.crt' >/dev/null; then
  cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/"
  chroot "$root" update-ca-certificates >/dev/null 2>&1
fi
# Folders of packages that this machine's pip looks into, at the same place; what lies there is preferred.
folders=$(python3 -m pip config get global.find-links 2>/dev/null || true)
for folder in $folders; do
  [[ -d $folder ]] || continue
  mkdir -p "$root$folder"
  cp "$folder"/*.whl "$root$folder/" 2>/dev/null || true
done
if [[ -n $folders ]]; then
  printf '[global]\nfind-links = %s\nbreak-system-packages = true\n' "$folders" >"$root/etc/pip.conf"
fi

rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,info}/* "$root"/var/log/*
find "$root" -name __pycache__ -prune -exec rm -rf {} +
tar -C "$root" -c . | docker import \
  --change 'CMD ["python3"]' --change 'ENV LANG=C.UTF-8' - "$image" >/dev/null
echo "$image: $(docker image inspect --format '{{.Size}}' "$image" | awk '{printf "%.2f GB", $1 / 1e9}')"
