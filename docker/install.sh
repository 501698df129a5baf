#!/usr/bin/env bash
# Inside an image under construction: the steps that all backends share, one layer each.
#   install.sh torch cpu|gpu     the environment, and torch unless the base image has one
#   install.sh packages [EXTRA]  what pyproject.toml asks for, without the project itself
#   install.sh project BACKEND   the project, last; fails unless doctor says that the backend can run
# The files that a step depends on lie beside this one, or, for the last step, in the project.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

torch() {
  local index=()
  # What is already there stays, as in vendors' images, whose torch fits the rest of them.
  python3 -m venv --system-site-packages "$VIRTUAL_ENV"
  python -c 'import torch' 2>/dev/null && return
  # PyPI's build for Linux brings CUDA along; a machine that prefers another finds it through pip.conf.
  if [[ $1 == cpu && ! -s /etc/pip.conf ]]; then
    index=(--index-url https://download.pytorch.org/whl/cpu)
  fi
  pip install "${index[@]}" "$(grep '^torch==' "$here/constraints.txt")"
  # Compiled tests, an eighth of it; the shared-memory manager is all that runs from its bin/.
  local package
  package=$(python -c 'import torch; print(torch.__path__[0])')
  rm -rf "$package/test"
  find "$package/bin" -type f ! -name torch_shm_manager -delete
}

packages() {
  local constraints=/tmp/constraints.txt
  {
    grep -v '^torch==' "$here/constraints.txt"
    python -c 'import torch; print(f"torch=={torch.__version__}")'
  } >$constraints
  python - "$here/pyproject.toml" "$@" >/tmp/requirements.txt <<'PYTHON'
import sys
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for name in sys.argv[2:] for line in extras[name]), sep="\n")
PYTHON
  pip install -c $constraints --find-links /opt/cache/wheels -r /tmp/requirements.txt
  local package
  for package in numpy pandas pyarrow sympy networkx; do
    find "$VIRTUAL_ENV"/lib/python3*/site-packages/$package -depth -type d -name tests -exec rm -rf {} +
  done
  rm -rf /tmp/*
}

project() {
  cd "$here/.."
  source launch/setup.sh
  pip install --no-deps --no-build-isolation --editable .
  mark_installed single "$1"
  launch/run.sh doctor
  # Apex wants a GPU, which a build has not: its Dockerfile asserts what can be asserted.
  [[ $1 == apex ]] || launch/run.sh doctor | grep -qE "^$1 +yes"
  rm -rf /tmp/*
}

"$@"
