#!/usr/bin/env bash
# Inside an image under construction, last: install_project.sh BACKEND
# Installs the project that it lies in; fails unless doctor says that the backend can run.
set -euo pipefail
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
pip install --no-deps --no-build-isolation --editable .
mark_installed single "$1"
found=$(launch/run.sh doctor)
echo "$found"
# Apex wants a GPU, which a build has not: its Dockerfile asserts what can be asserted.
[[ $1 == apex ]] || grep -qE "^$1 +yes" <<<"$found"
# A umask of the checkout may have let nobody else read the sources, which any user is to run.
chmod -R a+rX .
# What lies below /root on the host is mounted at the same path, also where the container runs as another user.
chmod a+x /root
rm -rf /tmp/*
