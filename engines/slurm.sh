# shellcheck shell=bash disable=SC2154
# From here on the script is the same for all jobs (engines/slurm.sh): output_dir, cpus_per_task, requeue, overwrite and the
# function train, which runs Lockstep's command for a node, are those of this job.

# The first node's address, as SLURM knows it: its name need not resolve on the others.
master_addr=$(scontrol show node --oneliner "$(scontrol show hostnames | head -n 1)" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
# Jobs that share a node must not meet on one port.
master_port=$((10000 + SLURM_JOB_ID % 20000))
export master_addr master_port

# What an allocation in which sbatch was called has bound its steps to: other nodes, perhaps.
unset "${!SLURM_CPU_BIND@}"

# Whatever else runs in this directory, or is still in the queue.
job=$output_dir/job$SLURM_JOB_ID

# A job that starts again continues the run, or what it was to continue itself if it has not saved anything yet. What was
# saved before it first began belongs to a run that --overwrite replaces.
start=() begun=$job.begun
if ((${SLURM_RESTART_COUNT:-0})); then
  start=(--overwrite)
  saved=$(find "$output_dir"/node*/checkpoints -mindepth 1 ${overwrite:+-newer "$begun"} -print -quit 2>/dev/null)
  if [[ $saved ]]; then start=(--no-overwrite --resume=latest); fi
fi
[[ -e $begun ]] || touch "$begun"

# What srun runs on each node. That a run has stopped after a checkpoint (75) is no failure, for which srun would end the
# nodes that still save theirs.
on_node() {
  train "$@" &
  echo $! >"$job.node$SLURM_NODEID.pid"
  local code=0
  wait $! || code=$?
  echo $code >"$job.node$SLURM_NODEID.exit"
  ((code == 75)) || return $code
}
export -f train on_node
export job

rm -f "$job".node*.pid "$job".node*.exit "$job.code"
# With --export=NONE for the job, srun would not pass on the functions above.
srun --export=ALL --ntasks-per-node=1 --cpus-per-task="$cpus_per_task" --kill-on-bad-exit=1 --input=none --open-mode=append \
  --output="${output_dir//%/%%}/node%n.log" bash -c 'on_node "$@"' bash "${start[@]}" &
srun=$!

# Only the command of node 0, which runs on this machine, is told to stop: it stops all nodes. A signal that SLURM sends to
# a step reaches the ranks, too, and would end them.
stop() {
  until [[ -s $job.node0.pid ]] || ! kill -0 $srun 2>/dev/null; do sleep 0.1; done
  kill -TERM "$(<"$job.node0.pid")" 2>/dev/null
}
is_time_over=
# A second SIGTERM would end it at once.
trap 'trap "" USR1; stop' TERM
trap 'is_time_over=yes; stop' USR1

while
  wait $srun
  code=$?
  kill -0 $srun 2>/dev/null # else a signal has interrupted the wait
do :; done
# The nodes that srun ended since another had failed have left no code, and theirs would say nothing of the cause.
codes=$(sort -n "$job".node*.exit 2>/dev/null)
failed=$(grep -vx -e 0 -e 75 <<<"$codes" | tail -n 1)
if [[ $failed ]]; then
  code=$failed
elif ((code == 0)) && [[ $codes ]]; then
  code=${codes##*$'\n'}
fi
rm -f "$job".node*.pid "$job".node*.exit
if ((code == 75)) && [[ $is_time_over && $requeue ]] && scontrol requeue "$SLURM_JOB_ID"; then
  trap - TERM
  exec sleep 60 # until SLURM ends this start of the job
fi
rm -f "$begun"
# For a command that could not ask SLURM before it forgot the job.
echo "$code" >"$job.code"
exit "$code"
