# shellcheck shell=bash disable=SC2154
# Sourced by run.sh: runs a backend in its image instead of in this machine's Python, with the same options.
# Directories that options name are mounted at the same paths; what is made there belongs to the caller.

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")

# run_in_docker BACKEND [OPTIONS]: does not return.
run_in_docker() {
  local backend=$1 image parent=$PWD/runs option value arguments=() mounts=() settings=()
  image=lockstep/$backend:$version
  shift
  check_engine
  while (($#)); do
    option=$1 value=
    shift
    [[ $option == --docker ]] && continue
    if [[ $option == --*=* ]]; then
      value=${option#*=} option=${option%%=*}
      arguments+=("$option")
    else
      arguments+=("$option")
      [[ ${1:-} == --* ]] || { value=${1:-} && shift $(($# > 0)); }
    fi
    case $option in
      --output-dir)
        [[ -n $value ]] || fail "--output-dir: name a directory"
        value=$(realpath -m -- "$value")
        parent=$(dirname "$value")
        ;;
      --train-file | --validation-file | --config | --model | --dataset)
        if [[ -e $value ]]; then
          value=$(realpath -- "$value")
          mounts+=(--volume "$value:$value:ro")
        fi
        ;;
      --device) [[ $value == cuda ]] && settings+=(--gpus all) ;;
      --num-nodes) settings+=(--network host) ;;
    esac
    [[ -z $value ]] || arguments+=("$value")
  done
  [[ $backend == apex ]] && settings+=(--gpus all)
  [[ " ${settings[*]} " != *" --gpus "* ]] || check_gpu_runtime "$backend"
  mkdir -p "$parent" 2>/dev/null || true
  [[ -d $parent && -w $parent ]] ||
    fail "--output-dir: $parent is not writable for user $(id -un), who the container runs as; choose another directory"
  ensure_image "$backend" "$image"

  # Root's results belong to whoever has the directory that they go to.
  local user
  user=$(id -u):$(id -g)
  ((EUID)) || user=$(stat -c %u:%g "$parent")
  local cache=${LOCKSTEP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lockstep}
  mkdir -p "$cache" && { ((EUID)) || chown "$user" "$cache"; }
  [[ -t 0 && -t 1 ]] && settings+=(--interactive --tty)
  exec docker run --rm --init --user "$user" --read-only --tmpfs /tmp:exec --cap-drop ALL \
    --security-opt no-new-privileges --shm-size 1g --volume "$parent:$parent" --volume "$cache:$cache" "${mounts[@]}" \
    --env LOCKSTEP_RUNS="$parent" --env LOCKSTEP_CACHE="$cache" "${settings[@]}" "$image" "${arguments[@]}"
}

check_engine() {
  local answer
  command -v docker >/dev/null || fail "--docker: docker is not installed (Debian: apt-get install docker.io)"
  if ! answer=$(docker version --format '{{.Server.Version}}' 2>&1); then
    case $answer in
      *"permission denied"*)
        fail "--docker: user $(id -un) may not use the engine's socket; join the group docker, or ask its administrator" ;;
      *) fail "--docker: no Docker engine answers; start it (systemctl start docker), or set DOCKER_HOST" ;;
    esac
  fi
}

check_gpu_runtime() {
  docker info --format '{{json .Runtimes}} {{json .}}' 2>/dev/null | grep -qE '"nvidia|nvidia.com/gpu' ||
    fail "--docker: $1 on a GPU needs NVIDIA's runtime in Docker; install nvidia-container-toolkit, or drop --device cuda"
}

# Builds the image where there is none, or where the sources have changed since.
ensure_image() {
  local backend=$1 image=$2 sources built architecture
  sources=$(cd "$root" && find backends compare contract docker launch tasks tests LICENSE README.md pyproject.toml \
    -type f -not -path '*/__pycache__/*' -print0 | sort -z | xargs -0 cat | cksum | cut -d ' ' -f 1)
  built=$(docker image inspect --format '{{index .Config.Labels "lockstep.sources"}}' "$image" 2>/dev/null) || built=
  if [[ -z $built ]] || { [[ $built != "$sources" ]] && [[ $built != unknown ]]; }; then
    build_image "$backend" "$image" "$sources"
  fi
  architecture=$(docker image inspect --format '{{.Architecture}}' "$image")
  [[ $architecture == "$(docker version --format '{{.Server.Arch}}')" ]] ||
    fail "--docker: $image was made for $architecture; build it on this machine: docker image rm $image, then again"
}

build_image() {
  local backend=$1 image=$2 sources=$3 log base=()
  log=$(mktemp "${TMPDIR:-/tmp}/lockstep-build.XXXXXX")
  [[ -z ${LOCKSTEP_BASE_IMAGE:-} ]] || base=(--build-arg "BASE_IMAGE=$LOCKSTEP_BASE_IMAGE")
  echo "lockstep: building $image (minutes the first time; log: $log)" >&2
  # Clients without buildx have the engine's own builder only.
  docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0
  if ! docker build --file "$root/docker/$backend/Dockerfile" --tag "$image" "${base[@]}" \
    --build-arg SOURCES="$sources" --build-arg REVISION="$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)" \
    "$root" >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    echo "lockstep: $image could not be built; the whole log is $log" >&2
    exit 1
  fi
  rm -f "$log"
}
