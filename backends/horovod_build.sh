#!/usr/bin/env bash
# Builds Horovod's wheel for the torch of one interpreter and prints the directory that holds it:
#   backends/horovod_build.sh PYTHON
#   backends/horovod_build.sh --check PYTHON     only says what is missing for it, if anything is, and fails then
# PyPI has Horovod's source only, and it does not compile against torch 2.1 or later as it is: torch's
# headers need C++17. The wheel is kept in the cache, one for each Python, torch and set of transports.
set -euo pipefail

version=0.28.1
cache=${LOCKSTEP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lockstep}

# tools: fails, with one line, unless all that a build needs is installed.
tools() {
  local tool missing=()
  for tool in g++ cmake make; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    missing+=("Python.h")
  ((${#missing[@]})) || return 0
  printf -v tool '%s, ' "${missing[@]}"
  echo "lockstep: building Horovod for $python needs ${tool%, }; install what is missing" \
    "(Debian: apt-get install g++ cmake make python3-dev)" >&2
  return 2
}

transports=gloo
mpi=(HOROVOD_WITHOUT_MPI=1)
if mpicxx -x c++ -fsyntax-only - <<<"#include <mpi.h>" 2>/dev/null; then # which may be there without its headers
  transports=gloo-mpi
  mpi=(HOROVOD_WITH_MPI=1)
fi
if [[ $1 == --check ]]; then
  python=$2
  # A wheel of an earlier build needs no tools. Which torch there will be is known, and whether it has CUDA is not.
  torch=$(sed -n 's/^torch==//p' "$(dirname "${BASH_SOURCE[0]}")/../launch/constraints.txt")
  tag=$("$python" -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')-torch$torch
  wheels=$cache/wheels/horovod-$version-$tag
  compgen -G "$wheels*-$transports/*.whl" >/dev/null || compgen -G "$wheels*-$transports-nccl*/*.whl" >/dev/null || tools
  exit
fi
python=$1
# GPU operations where torch has CUDA and the compiler is there; NCCL is the one that torch brought.
cuda=()
nccl=$("$python" -c 'import torch, nvidia.nccl; print(next(iter(nvidia.nccl.__path__)) if torch.version.cuda else "")' 2>/dev/null || true)
if [[ -n $nccl ]] && command -v nvcc >/dev/null; then
  # This machine's, or the common ones where a build has no GPU, as that of an image.
  architectures=$("$python" -c 'import torch
print("%d%d" % torch.cuda.get_device_capability() if torch.cuda.is_available() else "80,90")')
  transports=$transports-nccl-${architectures/,/-}
  cuda=("CUDA_HOME=$(dirname "$(dirname "$(command -v nvcc)")")" HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
    "HOROVOD_NCCL_INCLUDE=$nccl/include"
    HOROVOD_BUILD_CUDA_CC_LIST="$architectures")
fi
tags=$("$python" -c 'import sys, torch; print(f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}")')
wheels=$cache/wheels/horovod-$version-$tags-$transports
if compgen -G "$wheels/*.whl" >/dev/null; then
  echo "$wheels"
  exit
fi

tools
mkdir -p "$cache/wheels"
work=$(mktemp -d "$cache/wheels/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
if ((${#cuda[@]})); then
  # The package has the library under its versioned name alone.
  mkdir "$work/nccl"
  ln -s "$nccl"/lib/libnccl.so.* "$work/nccl/libnccl.so"
  cuda+=("HOROVOD_NCCL_LIB=$work/nccl" "LDFLAGS=-Wl,-rpath,$nccl/lib")
fi
{
  "$python" -m pip install --disable-pip-version-check "setuptools<81" wheel packaging cffi cloudpickle psutil pyyaml
  (cd "$work" && "$python" -m pip download --disable-pip-version-check --no-deps --no-build-isolation \
    --no-binary :all: "horovod==$version" && tar xf "horovod-$version.tar.gz")
  source=$work/horovod-$version
  sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
  # Without debug information the library has 2 MB instead of 62.
  sed -i 's/RelWithDebInfo/Release/' "$source/setup.py"
  # gcc 13 and later: headers no longer include each other, and a const member forbids assignment.
  sed -i 's/const size_type count_;/size_type count_;/' \
    "$source/third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
  # Each file of Horovod includes the headers of torch; twelve files that are compiled as one read them once. gloo's
  # files cannot be put together, and those for GPUs were never tried.
  ((${#cuda[@]})) || sed -i '1i set(CMAKE_UNITY_BUILD ON)\nset(CMAKE_UNITY_BUILD_BATCH_SIZE 12)' \
    "$source/horovod/torch/CMakeLists.txt"
  env -u MAKEFLAGS "${mpi[@]}" "${cuda[@]}" HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITHOUT_MXNET=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    CXXFLAGS="-include string -include stdexcept -include cstdint" \
    "$python" -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps -w "$work/wheel" "$source"
} >&2
mv -T "$work/wheel" "$wheels" 2>/dev/null || compgen -G "$wheels/*.whl" >/dev/null
echo "$wheels"
