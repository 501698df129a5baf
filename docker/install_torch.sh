#!/usr/bin/env bash
# Inside an image under construction: install_torch.sh cpu|gpu
# Makes the environment and puts torch there, unless the base image has one. Beside it: constraints.txt.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
index=()
# What is already there stays, as in vendors' images, whose torch fits the rest of them.
python3 -m venv --system-site-packages "$VIRTUAL_ENV"
python -c 'import torch' 2>/dev/null && exit
# PyPI's build for Linux brings CUDA along; a machine that prefers another finds it through pip.conf.
if [[ $1 == cpu && ! -s /etc/pip.conf ]]; then
  index=(--index-url https://download.pytorch.org/whl/cpu)
fi
pip install "${index[@]}" "$(grep '^torch==' "$here/constraints.txt")"
# Compiled tests, an eighth of it; the shared-memory manager is all that runs from its bin/.
package=$(python -c 'import torch; print(torch.__path__[0])')
rm -rf "$package/test"
find "$package/bin" -type f ! -name torch_shm_manager -delete
