#!/usr/bin/env bash
# SLURM job that trains with one process per GPU, and requeues itself at its time limit or when preempted:
#
#   sbatch scripts/slurm.sh experiment=mine exp_manager.name=mine
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 --time=04:00:00 scripts/slurm.sh experiment=mine
#   sbatch --nodes=2 --no-kill scripts/slurm.sh experiment=mine trainer.max_restarts=3 trainer.min_nodes=1
#
# With trainer.max_restarts or trainer.min_nodes it starts one process per node instead, which starts those of its GPUs,
# and again after a failure; then a lost node does not end the job.
#
# Arguments after the script's name are passed to `stoker train`. Number of processes, number of nodes, time limit and
# resuming are set below from SLURM's variables, unless you override them.
# Run `sbatch` with `stoker` on the PATH (SLURM passes the environment on), or set STOKER=/path/to/stoker.
#
#SBATCH --job-name=stoker
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -uo pipefail

EXIT_TERMINATED=143
STOP_EARLY=${STOKER_STOP_EARLY:-600} # seconds before the time limit at which the run saves and stops

log() { echo "slurm.sh: $*"; }

if [ -z "${SLURM_JOB_ID:-}" ]; then
  log "submit this script with sbatch; on one machine without SLURM run: stoker train trainer.devices=N" >&2
  exit 2
fi

# SIGTERM: preempted or cancelled. SIGUSR1: close to the time limit (--signal above). Both: save and stop.
# shellcheck disable=SC2329 # called by the traps
stop() {
  signalled=yes stopping=yes
  log "received $1; saving and stopping"
  [ -n "${step:-}" ] && kill -TERM "$step" 2>/dev/null
}
trap 'stop SIGTERM' TERM
trap 'stop SIGUSR1' USR1

# Print one squeue field of this job: %L time left, %T state.
job_field() { squeue --noheader --jobs "$SLURM_JOB_ID" --format "$1" 2>/dev/null | tr -d ' '; }

# Convert 01-02:03:04, 02:03:04 or 03:04 to seconds; print nothing for UNLIMITED and other text.
to_seconds() {
  local days=0 text=$1 hours minutes seconds
  [[ $text =~ ^([0-9]+-)?([0-9]+:)?[0-9]+:[0-9]+$ ]] || return 0
  if [[ $text == *-* ]]; then days=${text%%-*} text=${text#*-}; fi
  IFS=: read -r hours minutes seconds <<<"$text"
  if [ -z "$seconds" ]; then seconds=$minutes minutes=$hours hours=0; fi
  echo $((((10#$days * 24 + 10#$hours) * 60 + 10#$minutes) * 60 + 10#$seconds))
}

nodes=${SLURM_JOB_NUM_NODES:-1}
tasks=${SLURM_NTASKS:-$((nodes * ${SLURM_NTASKS_PER_NODE:-1}))}
overrides=()
# add_default KEY VALUE ARGUMENTS...: add the override KEY=VALUE unless one of the arguments sets that key.
add_default() {
  local key=$1 value=$2 argument
  shift 2
  for argument; do [[ $argument =~ ^[+]*${key//./\\.}= ]] && return; done
  overrides+=("$key=$value")
}
add_default trainer.num_nodes "$nodes" "$@"
add_default trainer.devices "$((tasks / nodes))" "$@"
add_default exp_manager.resume_if_exists true "$@"
limit=
left=$(to_seconds "$(job_field %L)")
if [ -n "$left" ] && [ "$left" -gt $((2 * STOP_EARLY)) ]; then
  limit=$((left - STOP_EARLY))
  add_default exp_manager.max_time_per_run "'$(printf '%02d:%02d:%02d:%02d' \
    $((limit / 86400)) $((limit / 3600 % 24)) $((limit / 60 % 60)) $((limit % 60)))'" "$@"
fi

# One agent for each node if it is to restart processes, otherwise one task for each GPU.
cpus=${SLURM_CPUS_PER_TASK:-}
launch=(--ntasks="$tasks" --distribution=block --kill-on-bad-exit=1)
for argument; do
  if [[ $argument =~ ^[+]*trainer\.(max_restarts|min_nodes)= || $argument == --restart* ]]; then
    launch=(--ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill)
    cpus=${SLURM_CPUS_PER_TASK:+$((SLURM_CPUS_PER_TASK * tasks / nodes))}
    break
  fi
done

# Rendezvous: the first node, and a port that other jobs are unlikely to use.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

log "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), $tasks processes, rendezvous at $MASTER_ADDR:$MASTER_PORT"
srun "${launch[@]}" ${cpus:+--cpus-per-task="$cpus"} \
  "${STOKER:-stoker}" train "${overrides[@]}" "$@" &
step=$!
[ -n "${stopping:-}" ] && kill -TERM "$step" 2>/dev/null # the signal came before there was a step
# A signal interrupts `wait`, not the run: wait again until the exit code is that of the run.
code=127
while :; do
  signalled=
  wait "$step"
  status=$?
  [ "$status" = 127 ] && break # no process is left
  code=$status
  [ -z "$signalled" ] && break
done

reason=
[ "$code" = "$EXIT_TERMINATED" ] && reason="stopped by a signal after saving a checkpoint"
[ "$code" = 0 ] && [ -n "$limit" ] && [ "$SECONDS" -ge "$limit" ] && reason="time limit reached"
# A cancelled job is no longer RUNNING and is not requeued; a finished run that is requeued ends at once.
if [ -n "$reason" ] && [ "$(job_field %T)" = RUNNING ]; then
  log "$reason; requeuing the job"
  scontrol requeue "$SLURM_JOB_ID" && exit "$code"
  log "scontrol requeue failed; run the same sbatch command to resume"
fi
exit "$code"
