# shellcheck shell=bash disable=SC2154
# Sourced by run.sh: runs a backend in its image instead of in this machine's Python, with the same options.
# Files that options name on the command line are mounted at the same paths; what the run writes belongs to the
# caller, or for root to the owner of its directory. Paths inside a --config file are not known here.

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
# Variables of the user's environment that a run may need: those of the hub and of proxies.
passed_on=(HF_TOKEN HF_ENDPOINT HF_HUB_OFFLINE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy)

# run_in_docker BACKEND [OPTIONS]: does not return.
run_in_docker() {
  local backend=$1 parent=$PWD/runs variant image option value settings=() arguments=()
  local -A inputs=()
  [[ -f $(dockerfile "$backend") ]] || fail "--docker: there is no image of '$backend'; choose $(images | paste -sd ' ')"
  shift
  check_engine
  variant=$(variants "$backend" | head -n 1)
  while (($#)); do
    option=$1
    shift
    [[ $option != --docker ]] || continue
    case $option in
      --output-dir=* | --train-file=* | --validation-file=* | --data-dir=* | --config=* | --model=* | --dataset=* | --device=* | --num-nodes=* | --resume=*)
        value=${option#*=} option=${option%%=*} ;;
      --output-dir | --train-file | --validation-file | --data-dir | --config | --model | --dataset | --device | --num-nodes)
        (($#)) || fail "$option: expects a value"
        value=$1
        shift
        ;;
      --resume) # its value may be missing
        value=latest
        if (($#)) && [[ $1 != -* ]]; then
          value=$1
          shift
        fi
        ;;
      *)
        arguments+=("$option")
        continue
        ;;
    esac
    case $option in
      --output-dir)
        [[ -n $value ]] || fail "--output-dir: name a directory"
        value=$(realpath -m -- "$value")
        parent=$(dirname "$value")
        [[ $parent != / ]] || fail "--output-dir $value: cannot be in / with --docker; choose a directory further down"
        ;;
      --device) [[ $value != cuda ]] || variant=gpu ;;
      --num-nodes) settings+=(--network host) ;;
      *)
        if [[ -e $value ]]; then
          value=$(realpath -- "$value")
          inputs[$value]=1
        fi
        ;;
    esac
    arguments+=("$option" "$value")
  done
  if [[ $variant == gpu ]]; then
    grep -qx gpu <<<"$(variants "$backend")" ||
      fail "--device cuda: the image of $backend computes on the CPU; drop this option or --docker (docker/$backend/Dockerfile says if it can have GPUs)"
    check_gpu_runtime "$backend"
    settings+=(--gpus all)
  fi
  mkdir -p "$parent" 2>/dev/null || true
  [[ -d $parent && -w $parent ]] ||
    fail "--output-dir: $parent is not writable for user $(user_name), who the container runs as; choose another directory"
  image=lockstep/$backend:$version
  [[ $variant == "$(variants "$backend" | head -n 1)" ]] || image+=-$variant
  ensure_image "$backend" "$image" "$variant"

  # For root, the results belong to the owner of the directory that they are written to.
  local user cache
  cache=$(cache_directory)
  user=$(id -u):$(id -g)
  ((EUID)) || user=$(stat -c %u:%g "$parent")
  if [[ $user != "$(id -u):$(id -g)" ]]; then
    cache=$cache/${user/:/-} # root keeps its own, from which it installs packages
    mkdir -p "$cache" && chown "$user" "$cache"
  fi
  mkdir -p "$cache"
  mount_path "$parent"
  mount_path "$cache"
  for value in "${!inputs[@]}"; do
    [[ $value == "$parent" || $value == "$parent"/* ]] || mount_path "$value" ,readonly
  done
  [[ $parent == /tmp ]] || settings+=(--tmpfs /tmp:exec)
  [[ ! -t 0 || ! -t 1 ]] || settings+=(--interactive --tty)
  for option in "${passed_on[@]}"; do
    [[ -z ${!option:-} ]] || settings+=(--env "$option")
  done
  exec docker run --rm --init --user "$user" --read-only --cap-drop ALL --security-opt no-new-privileges \
    --shm-size 1g --env LOCKSTEP_RUNS="$parent" --env LOCKSTEP_CACHE="$cache" --env HF_HOME="$cache/huggingface" \
    "${settings[@]}" "$image" "${arguments[@]}"
}

dockerfile() {
  echo "$root/docker/$1/Dockerfile"
}

# images: the backends that have an image.
images() {
  local name
  for name in $(backend_names); do
    [[ ! -f $(dockerfile "$name") ]] || echo "$name"
  done
}

# variants BACKEND: the variants of its image, the default first, from a line of its Dockerfile.
variants() {
  sed -n 's/^# Variants: //p' "$(dockerfile "$1")" | tr ' ' '\n'
}

# mount_path PATH [,OPTIONS]: mounts it at the same path in the container.
mount_path() {
  [[ $1 != *,* ]] || fail "$1: a path with a comma cannot be mounted; rename it, or drop --docker"
  settings+=(--mount "type=bind,source=$1,target=$1${2:-}")
}

user_name() {
  id -un 2>/dev/null || true # a user may have no name
}

check_engine() {
  local answer
  command -v docker >/dev/null || fail "--docker: docker is not installed (Debian: apt-get install docker.io)"
  if ! answer=$(docker version --format '{{.Server.Version}}' 2>&1); then
    case $answer in
      *"permission denied"*)
        fail "--docker: user $(user_name) may not use the engine's socket; join the group docker, or ask its administrator" ;;
      *) fail "--docker: no Docker engine answers; start it (systemctl start docker), or set DOCKER_HOST" ;;
    esac
  fi
}

# Its runtime is registered with the engine, or its hook lies beside it.
check_gpu_runtime() {
  command -v nvidia-container-runtime-hook >/dev/null && return
  docker info --format '{{json .Runtimes}}' | grep -q '"nvidia"' ||
    fail "--docker: $1 on a GPU needs NVIDIA's runtime in Docker; install nvidia-container-toolkit, or drop --device cuda"
}

# A checksum of the names and contents of all files that an image is made from.
sources_key() {
  (cd "$root" && find .dockerignore backends compare contract docker engines forecast launch parity records tasks training watch LICENSE README.md pyproject.toml \
    -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 cksum | cksum | cut -d ' ' -f 1)
}

# ensure_image BACKEND IMAGE [VARIANT]: builds it where there is none, or where the sources have changed since.
ensure_image() {
  local image=$2 built architecture
  built=$(docker image inspect --format '{{index .Config.Labels "lockstep.sources"}}' "$image" 2>/dev/null) || built=
  [[ $built == "$(sources_key)" ]] || build_image "$1" "$image" "${3:-cpu}"
  architecture=$(docker image inspect --format '{{.Architecture}}' "$image")
  [[ $architecture == "$(docker version --format '{{.Server.Arch}}')" ]] ||
    fail "--docker: $image was made for $architecture; remove it (docker image rm $image), and it is built anew"
}

build_image() {
  local backend=$1 image=$2 variant=$3 log base options=()
  # The variable that names its base image, if it has one of its own: also a line of its Dockerfile.
  base=$(sed -n 's/^# Base image: //p' "$(dockerfile "$backend")")
  base=${base:-LOCKSTEP_BASE_IMAGE}
  base=${!base:-}
  [[ -z $base ]] || options=(--build-arg "BASE_IMAGE=$base")
  log=$(mktemp "${TMPDIR:-/tmp}/lockstep-build.XXXXXX")
  echo "lockstep: building $image (minutes the first time; log: $log)" >&2
  # Without buildx, only the engine's own builder can be used.
  docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0
  if ! docker build --file "$(dockerfile "$backend")" --tag "$image" "${options[@]}" \
    --build-arg VARIANT="$variant" --build-arg SOURCES="$(sources_key)" \
    --build-arg REVISION="$(git -C "$root" rev-parse HEAD 2>/dev/null)" "$root" >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    echo "lockstep: $image could not be built; the whole log is $log" >&2
    exit 1
  fi
  rm -f "$log"
}
