#!/usr/bin/env bash
# Inside an image under construction: install_packages.sh [EXTRA]
# Installs what pyproject.toml asks for, without the project itself. Beside it: pyproject.toml, constraints.txt.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
unset PIP_CONSTRAINT # vendors' images pin what they came with, all of it
constraints=/tmp/constraints.txt
if [[ -d $(echo "$VIRTUAL_ENV"/lib/python3*/site-packages/torch) ]]; then
  cp "$here/constraints.txt" $constraints
  sed -i "s/^torch==.*/torch==$(python -c 'import torch; print(torch.__version__)')/" $constraints
else
  # torch is the base image's, and so is what was compiled against the same libraries; the rest has to fit.
  python >$constraints <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version

for name in ("torch", "numpy", "pyarrow", "pandas"):
    try:
        print(f"{name}=={version(name)}")
    except PackageNotFoundError:
        pass
PYTHON
fi
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
built=()
for folder in /opt/cache/wheels/*/; do
  [[ ! -d $folder ]] || built=(--find-links "$folder" --only-binary horovod)
done
pip install -c $constraints "${built[@]}" -r /tmp/requirements.txt
for package in numpy pandas pyarrow sympy networkx; do
  for folder in "$VIRTUAL_ENV"/lib/python3*/site-packages/"$package"; do
    [[ ! -d $folder ]] || find "$folder" -depth -type d -name tests -exec rm -rf {} +
  done
done
rm -rf /tmp/*
