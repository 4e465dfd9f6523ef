#!/usr/bin/env bash
# A SLURM job that trains with one process per GPU, and goes on by itself when its time is over or it was preempted:
#
#   sbatch scripts/slurm.sh experiment=mine exp_manager.name=mine
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 --time=04:00:00 scripts/slurm.sh experiment=mine
#
# What follows the name of the script is for `stoker train`. Number of processes, number of machines, a time limit and
# resuming are set below from what SLURM says, each unless an override of your own sets it.
# Run `sbatch` where `stoker` is on the PATH (SLURM hands the environment on), or name it: STOKER=/path/to/stoker.
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
STOP_EARLY=${STOKER_STOP_EARLY:-600} # seconds before the limit at which the run saves and stops by itself

say() { echo "slurm.sh: $*"; }

if [ -z "${SLURM_JOB_ID:-}" ]; then
  say "start me with sbatch; on one machine without SLURM: stoker train trainer.devices=N" >&2
  exit 2
fi

# One field of squeue about this job: %L the time that is left, %T the state.
asked() { squeue --noheader --jobs "$SLURM_JOB_ID" --format "$1" 2>/dev/null | tr -d ' '; }

# 01-02:03:04, 02:03:04 or 03:04 to seconds; nothing for UNLIMITED and what is not known.
seconds_of() {
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
# KEY VALUE WORDS...: the override KEY=VALUE, unless one of the words sets that key.
unless_given() {
  local key=$1 value=$2 word
  shift 2
  for word; do [[ $word =~ ^[+]*${key//./\\.}= ]] && return; done
  overrides+=("$key=$value")
}
unless_given trainer.num_nodes "$nodes" "$@"
unless_given trainer.devices "$((tasks / nodes))" "$@"
unless_given exp_manager.resume_if_exists true "$@"
limit=
left=$(seconds_of "$(asked %L)")
if [ -n "$left" ] && [ "$left" -gt $((2 * STOP_EARLY)) ]; then
  limit=$((left - STOP_EARLY))
  unless_given exp_manager.max_time_per_run "'$(printf '%02d:%02d:%02d:%02d' \
    $((limit / 86400)) $((limit / 3600 % 24)) $((limit / 60 % 60)) $((limit % 60)))'" "$@"
fi

# Where the processes meet: the first machine, and a port that other jobs there are unlikely to have.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# SIGTERM: preempted or cancelled. SIGUSR1: the limit is near (--signal above). Both mean: save and stop.
# shellcheck disable=SC2329 # the traps call it
stop() {
  signalled=yes
  say "told to stop ($1); saving"
  [ -n "${step:-}" ] && kill -TERM "$step" 2>/dev/null
}
trap 'stop SIGTERM' TERM
trap 'stop SIGUSR1' USR1

say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), $tasks processes, meeting at $MASTER_ADDR:$MASTER_PORT"
srun --ntasks="$tasks" --distribution=block --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  "${STOKER:-stoker}" train "${overrides[@]}" "$@" &
step=$!
# A signal ends a wait, not the run: wait again until the exit code is that of the run.
code=127
while :; do
  signalled=
  wait "$step"
  status=$?
  [ "$status" = 127 ] && break # nothing is left to wait for
  code=$status
  [ -z "$signalled" ] && break
done

again=
[ "$code" = "$EXIT_TERMINATED" ] && again="stopped by a signal, after a checkpoint"
[ "$code" = 0 ] && [ -n "$limit" ] && [ "$SECONDS" -ge "$limit" ] && again="its time is over"
# A job that was cancelled is no longer running, and stays away; one that was finished ends at once when started again.
if [ -n "$again" ] && [ "$(asked %T)" = RUNNING ]; then
  say "$again: asking for another start"
  scontrol requeue "$SLURM_JOB_ID" && exit "$code"
  say "SLURM did not take it back; sbatch the same command to go on"
fi
exit "$code"
