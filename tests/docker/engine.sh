#!/usr/bin/env bash
# A Docker engine for the tests, where none answers yet, and both compose: engine.sh start | compose | stop
# As root, from Debian's packages; everything lies in /run/lockstep-docker.
set -euo pipefail
state=/run/lockstep-docker

start() {
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io iptables iproute2)
  command -v debootstrap >/dev/null || missing+=(debootstrap)
  if ((${#missing[@]})); then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
  docker version >/dev/null 2>&1 && return
  mkdir -p $state
  # At the back of the queue: images are built beside tests that have deadlines.
  setsid nohup nice -n 15 dockerd --pidfile $state/engine.pid >$state/log 2>&1 </dev/null &
  for _ in $(seq 60); do
    docker version >/dev/null 2>&1 && return
    sleep 0.5
  done
  tail -n 5 $state/log >&2
  echo "engine: dockerd did not answer within 30 s; its log is $state/log" >&2
  exit 1
}

# Compose v1 is in Debian 12; v2, a plugin of the client, in Debian 13, from which this takes the one file.
compose() {
  command -v docker-compose >/dev/null || {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker-compose >/dev/null
  }
  docker compose version >/dev/null 2>&1 && return
  local apt=$state/apt plugins=$state/config/cli-plugins
  [[ -x $plugins/docker-compose ]] && return
  mkdir -p "$apt"/{lists,cache}/partial "$apt/cache/archives/partial" "$plugins"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >"$apt/sources"
  local options=(-o "Dir::Etc::sourcelist=$apt/sources" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$apt/lists"
    -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root -qq)
  apt-get "${options[@]}" update
  (cd "$apt" && apt-get "${options[@]}" download docker-compose && dpkg -x docker-compose_*.deb unpacked)
  mv "$(find "$apt/unpacked" -type f -name docker-compose -path '*cli-plugins*')" "$plugins/"
}

# Only one that this script has started.
stop() {
  [[ -f $state/engine.pid ]] || return 0
  kill "$(<$state/engine.pid)"
  for _ in $(seq 60); do
    [[ -f $state/engine.pid ]] || return 0
    sleep 0.5
  done
}

"$@"
