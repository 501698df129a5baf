#!/usr/bin/env bash
# Inside an image under construction: install_packages.sh [EXTRA]
# Installs what pyproject.toml asks for, without the project itself. Beside it: pyproject.toml, constraints.txt.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
constraints=/tmp/constraints.txt
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
for package in numpy pandas pyarrow sympy networkx; do
  find "$VIRTUAL_ENV"/lib/python3*/site-packages/$package -depth -type d -name tests -exec rm -rf {} +
done
rm -rf /tmp/*
