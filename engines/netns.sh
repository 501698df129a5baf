#!/usr/bin/env bash
# Hosts on one machine: netns.sh NUM_NODES LIMIT LOGS LINE
#   NUM_NODES  network namespaces n0, n1, ... with addresses 10.78.0.10, 10.78.0.11, ... on one bridge
#   LIMIT      how each limits what it sends, a list of tc's qdiscs separated by ";" (tc(8)); "" for no limit
#   LOGS       where the output of each goes: LOGS/node0.log, ...
#   LINE       what each runs, a line for bash, with NODE_RANK set
# It must be run inside mount and network namespaces of its own (unshare(1)), so that whatever it makes is gone when the
# last of its processes ends, even by SIGKILL. It ends when all nodes have ended; their exit codes are in LOGS/node0.exit, ...
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
num_nodes=$1 limit=$2 logs=$3 line=$4

mount -t tmpfs tmpfs /run
mkdir /run/netns
{
  echo "127.0.0.1 localhost"
  for ((i = 0; i < num_nodes; i++)); do echo "10.78.0.$((10 + i)) n$i"; done
} >/run/hosts
mount --bind /run/hosts /etc/hosts

ip link set lo up
ip link add br0 type bridge
ip link set br0 up
for ((i = 0; i < num_nodes; i++)); do
  ip netns add "n$i"
  ip link add "v$i" type veth peer name eth0 netns "n$i"
  ip link set "v$i" master br0 up
  ip -n "n$i" link set lo up
  ip -n "n$i" addr add "10.78.0.$((10 + i))/24" dev eth0
  ip -n "n$i" link set eth0 up
  IFS=';' read -ra qdiscs <<<"$limit"
  for qdisc in "${qdiscs[@]}"; do
    # shellcheck disable=SC2086  # several words
    tc -n "n$i" qdisc add dev eth0 $qdisc
  done
done

nodes=() stopping=
# A command ends on SIGTERM after a checkpoint, and at once on a second one.
trap 'stopping=yes; kill -TERM "${nodes[@]}" 2>/dev/null || true' TERM
for ((i = 0; i < num_nodes; i++)); do
  # A host has a name of its own.
  NODE_RANK=$i ip netns exec "n$i" unshare --uts bash -c 'hostname "n$NODE_RANK"; eval "exec $1"' bash "$line" \
    >>"$logs/node$i.log" 2>&1 </dev/null &
  nodes+=($!)
done
# A signal that came before reached only those that had started, or none.
if [[ $stopping ]]; then kill -TERM "${nodes[@]}" 2>/dev/null || true; fi
while ((${#nodes[@]})); do
  sleep 0.2 || true # wait -n forgets a process that ends while the trap runs
  for i in "${!nodes[@]}"; do
    if ! kill -0 "${nodes[i]}" 2>/dev/null; then
      code=0
      wait "${nodes[i]}" || code=$?
      echo "$code" >"$logs/node$i.exit"
      unset "nodes[i]"
    fi
  done
done
