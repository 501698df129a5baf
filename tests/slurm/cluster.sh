#!/usr/bin/env bash
# A SLURM cluster for the tests, with three nodes that are all this machine: cluster.sh start | stop
# As root, with Debian's slurm-wlm and munge; everything lies in /run/lockstep-slurm, and SLURM_CONF is slurm.conf there.
# Several slurmd on one host: https://slurm.schedmd.com/programmer_guide.html#multiple_slurmd_support
set -euo pipefail
state=/run/lockstep-slurm
export SLURM_CONF=$state/slurm.conf PATH=$PATH:/usr/sbin:/sbin

start() {
  [[ -f $SLURM_CONF ]] && sinfo >/dev/null 2>&1 && return # without the file, it would look for a cluster in the DNS
  stop
  mkdir -p $state/{log,control}
  chmod 755 $state
  configure
  head -c 128 /dev/urandom >$state/munge.key
  chmod 600 $state/munge.key
  munged --key-file=$state/munge.key --socket=$state/munge.sock --pid-file=$state/munged.pid \
    --log-file=$state/log/munged.log --seed-file=$state/munged.seed
  controller
  for node in node1 node2 node3; do node "$node"; done
  for _ in $(seq 600); do
    [[ $(sinfo --noheader --states=idle --format=%D) == 3 ]] && return
    sleep 0.1
  done
  tail -n 5 $state/log/*.log >&2
  echo "cluster: the nodes are not idle after 60 s; the logs are in $state/log" >&2
  exit 1
}

# Starts the daemon of the cluster, which a test may have ended.
controller() {
  slurmctld
}

# Starts the daemon of one node, which a test may have ended.
node() {
  mkdir -p "$state/spool.$1" "$state/tmp.$1"
  slurmd -N "$1"
}

configure() {
  local host
  host=$(hostname -s)
  cat >$state/slurm.conf <<END
ClusterName=lockstep
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is put back into the queue waits until its old credentials are void: five seconds at least.
AuthInfo=socket=$state/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$state/control
SlurmdSpoolDir=$state/spool.%n
TmpFS=$state/tmp.%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=2
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node[1-3] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17003] CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
END
  echo CgroupPlugin=cgroup/v1 >$state/cgroup.conf
}

# Only what this script has started: each daemon has left its number.
stop() {
  local file pid
  [[ -d $state ]] || return 0
  if [[ -f $state/slurmctld.pid ]] && timeout 5 scancel --user=root 2>/dev/null; then
    for _ in $(seq 100); do
      [[ -z $(squeue --noheader) ]] && break
      sleep 0.1
    done
  fi
  for file in $state/slurmd.*.pid $state/slurmctld.pid $state/munged.pid; do
    [[ -f $file ]] || continue
    pid=$(<"$file")
    kill "$pid" 2>/dev/null || continue
    for _ in $(seq 100); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
  done
  rm -rf $state
}

"$@"
