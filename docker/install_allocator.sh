#!/usr/bin/env bash
# Installs the memory allocator that ranks prefer. Its package has another name since Debian 13 and Ubuntu 24.04.
set -euo pipefail
apt-get update
apt-get install -y --no-install-recommends libtcmalloc-minimal4 ||
  apt-get install -y --no-install-recommends libtcmalloc-minimal4t64
rm -rf /var/lib/apt/lists/* /var/cache/apt/*
