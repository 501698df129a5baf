#!/usr/bin/env bash
# A Kubernetes cluster of one node for the tests, which is this machine: cluster.sh start | stop | load IMAGE
# As root. Its own programs (kube-apiserver, kube-controller-manager, kube-scheduler, kubelet) must be on PATH, since Debian has
# none of them; the others are Debian's etcd-server, containerd, runc, containernetworking-plugins, dnsmasq-base, busybox-static,
# tini and openssl, and kubectl. Everything lies in /run/lockstep-kubernetes, and what images take in /var/lib/lockstep-kubernetes.
# For a machine of your own: whoever reaches 127.0.0.1:17379 (etcd) or 10.222.0.1:17250 (kubelet) can do there what root can.
set -Eeuo pipefail
state=/run/lockstep-kubernetes
store=/var/lib/lockstep-kubernetes
bridge=lockstep-pods
gateway=10.222.0.1
server=https://127.0.0.1:17443
export KUBECONFIG=$state/admin.yaml PATH=$PATH:/usr/sbin:/sbin

programs=(etcd containerd runc ctr kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl dnsmasq busybox tini-static
  openssl docker ip)

settings=(vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys
  kernel.keys.root_maxbytes net.ipv4.ip_forward)

# Prints what is not on PATH.
missing() {
  local name
  for name in "${programs[@]}"; do command -v "$name" >/dev/null || echo "$name"; done
}

start() {
  [[ -f $KUBECONFIG ]] && kubectl get nodes >/dev/null 2>&1 && return
  [[ -z $(missing) ]] || {
    echo "cluster: not on PATH:" $(missing) >&2
    exit 2
  }
  stop
  mkdir -p $state/{log,pods,names,network} $store
  trap 'stop' ERR
  # The kubelet and the bridge change them.
  sysctl "${settings[@]}" 2>/dev/null >$state/sysctl || true
  configure
  make_network
  daemon etcd etcd --data-dir=$state/etcd --listen-client-urls=http://127.0.0.1:17379 \
    --advertise-client-urls=http://127.0.0.1:17379 --listen-peer-urls=http://127.0.0.1:17380
  daemon containerd containerd --config=$state/containerd.toml
  daemon kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:17379 --bind-address=127.0.0.1 --secure-port=17443 \
    --advertise-address=$gateway --kubelet-preferred-address-types=InternalIP --endpoint-reconciler-type=none --cert-dir=$state/certificates \
    --service-cluster-ip-range=10.223.0.0/24 --authorization-mode=RBAC --token-auth-file=$state/tokens.csv \
    --service-account-issuer=$server --service-account-key-file=$state/accounts.pub \
    --service-account-signing-key-file=$state/accounts.key
  wait_for "the API server" kubectl get --raw=/readyz
  daemon kube-controller-manager kube-controller-manager --kubeconfig=$KUBECONFIG --leader-elect=false \
    --service-account-private-key-file=$state/accounts.key --bind-address=127.0.0.1 --secure-port=17257
  daemon kube-scheduler kube-scheduler --kubeconfig=$KUBECONFIG --leader-elect=false --bind-address=127.0.0.1 --secure-port=17259
  daemon dnsmasq dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts --bind-interfaces \
    --listen-address=$gateway --hostsdir=$state/names --local=/cluster.local/ --pid-file
  daemon kubelet kubelet --kubeconfig=$KUBECONFIG --config=$state/kubelet.yaml --node-ip=$gateway \
    --hostname-override=node --root-dir=$state/kubelet
  daemon names "$0" names
  wait_for "the node" kubectl wait --for=condition=Ready node/node --timeout=1s
  load_pause
  kubectl create --filename=$state/volume.yaml >/dev/null
  wait_for "the account of pods" kubectl get serviceaccount default
}

# daemon NAME COMMAND...: starts it, and keeps its number and what it prints.
daemon() {
  setsid nohup "${@:2}" >"$state/log/$1" 2>&1 </dev/null &
  echo "$! $(began $!)" >"$state/$1.pid"
}

# began PID: when a process began, which no later one with its number has in common with it (proc_pid_stat(5)).
began() {
  cut -d' ' -f22 "/proc/$1/stat" 2>/dev/null || true
}

wait_for() {
  for _ in $(seq 120); do
    "${@:2}" >/dev/null 2>&1 && return
    sleep 0.5
  done
  tail -n 3 $state/log/* >&2
  echo "cluster: $1 is not ready after 60 s" >&2
  return 1
}

configure() {
  local token
  token=$(openssl rand -hex 16)
  (
    umask 077
    echo "$token,admin,admin,system:masters" >$state/tokens.csv
    openssl genrsa -out $state/accounts.key 2048 2>/dev/null
    cat >$KUBECONFIG <<END
apiVersion: v1
kind: Config
clusters: [{name: lockstep, cluster: {server: "$server", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: $token}}]
contexts: [{name: lockstep, context: {cluster: lockstep, user: admin}}]
current-context: lockstep
END
  )
  openssl rsa -in $state/accounts.key -pubout -out $state/accounts.pub 2>/dev/null
  cat >$state/containerd.toml <<END
version = 2
root = "$store/containerd"
state = "$state/containerd"
[grpc]
address = "$state/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/lockstep/pause:1"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "$state/network"
END
  cat >$state/network/10-pods.conflist <<END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "$bridge", "isGateway": true,
 "ipam": {"type": "host-local", "dataDir": "$state/addresses",
  "ranges": [[{"subnet": "10.222.0.0/24", "rangeStart": "10.222.0.10"}]]}}, {"type": "loopback"}]}
END
  # What it needs of a machine that is one's own, such as control groups of systemd, this one need not have.
  cat >$state/kubelet.yaml <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $gateway
port: 17250
healthzPort: 17248
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://$state/containerd.sock
podLogsDir: $state/pods
clusterDNS: [$gateway]
clusterDomain: cluster.local
resolvConf: ""
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
makeIPTablesUtilChains: false
failSwapOn: false
evictionHard: {nodefs.available: 0%, imagefs.available: 0%}
imageGCHighThresholdPercent: 100
END
  mkdir -p $state/results
  chmod 777 $state/results
  cat >$state/volume.yaml <<END
apiVersion: v1
kind: PersistentVolume
metadata: {name: results}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteMany]
  hostPath: {path: $state/results}
  storageClassName: ""
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: results, namespace: default}
spec:
  accessModes: [ReadWriteMany]
  resources: {requests: {storage: 1Gi}}
  storageClassName: ""
  volumeName: results
END
}

# The bridge of the pods, which reaches nothing else. Where a Docker engine has the kernel drop what it does not know, it must
# know what goes from pod to pod.
make_network() {
  ip link add $bridge type bridge
  ip address add $gateway/24 dev $bridge
  ip link set $bridge up
  if command -v iptables >/dev/null; then iptables --insert FORWARD --in-interface $bridge --out-interface $bridge --jump ACCEPT; fi
}

# Tells dnsmasq the names that a headless Service gives to pods, which a cluster's own name server does elsewhere.
names() {
  local fields='{.status.podIP} {.spec.hostname}.{.spec.subdomain}.{.metadata.namespace}.svc.cluster.local'
  while sleep 0.5; do
    kubectl get pods --all-namespaces --output="jsonpath={range .items[?(@.spec.subdomain)]}$fields{'\n'}{end}" 2>/dev/null |
      grep '^[0-9]' >$state/names.new || continue
    cmp --silent $state/names.new $state/names/pods || cp $state/names.new $state/names/pods
  done
}

# load IMAGE: copies an image of the Docker engine into the cluster.
load() {
  docker save "$1" | ctr --address=$state/containerd.sock --namespace=k8s.io images import - >/dev/null
}

# What holds the namespaces of a pod: it waits, and reaps what others leave behind.
load_pause() {
  local files
  files=$(mktemp -d)
  cp "$(command -v busybox)" "$(command -v tini-static)" "$files"
  tar --create --directory="$files" . | docker import --change 'ENTRYPOINT ["/tini-static", "-s", "--", "/busybox", "sleep", "infinity"]' \
    - lockstep/pause:1 >/dev/null
  rm -r "$files"
  load lockstep/pause:1
}

# Only what this script has started: each daemon has left its number, and when it began.
stop() {
  local name
  trap - ERR
  [[ -d $state ]] || return 0
  if [[ -f $state/kubelet.pid ]]; then
    timeout 60 kubectl delete jobs,pods --all --all-namespaces --now >/dev/null 2>&1 || true
  fi
  for name in names kubelet dnsmasq kube-scheduler kube-controller-manager kube-apiserver; do end $name; done
  end_containers
  for name in containerd etcd; do end $name; done
  ip link delete $bridge 2>/dev/null || true
  if command -v iptables >/dev/null; then
    iptables --delete FORWARD --in-interface $bridge --out-interface $bridge --jump ACCEPT 2>/dev/null || true
  fi
  sysctl --quiet --load=$state/sysctl 2>/dev/null || true
  awk -v state="$state/" 'index($2, state) == 1 { print $2 }' /proc/mounts | sort --reverse | xargs --no-run-if-empty umount --lazy
  rm -rf --one-file-system $state
}

# end NAME: ends a daemon, with SIGKILL if it takes more than ten seconds.
end() {
  local pid since
  [[ -f $state/$1.pid ]] || return 0
  read -r pid since <"$state/$1.pid"
  for signal in TERM KILL; do
    [[ -n $since && $(began "$pid") == "$since" ]] || return 0
    kill -s $signal "$pid" 2>/dev/null || return 0
    for _ in $(seq 100); do
      [[ $(began "$pid") == "$since" ]] || return 0
      sleep 0.1
    done
  done
}

# Ends what the API server could not: a pod whose deletion failed.
end_containers() {
  local ctr=(timeout 20 ctr --address=$state/containerd.sock --namespace=k8s.io) task
  [[ -S $state/containerd.sock ]] || return 0
  for task in $("${ctr[@]}" tasks list --quiet 2>/dev/null); do
    "${ctr[@]}" tasks delete --force "$task" >/dev/null 2>&1 || true
  done
}

case ${1:-} in
  start | stop | missing | names) "$1" ;;
  load) load "${2:?name an image}" ;;
  *)
    echo "cluster: give start, stop, load IMAGE or missing" >&2
    exit 2
    ;;
esac
