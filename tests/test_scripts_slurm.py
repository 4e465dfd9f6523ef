"""scripts/slurm.sh, with stand-ins for SLURM's commands: what it starts, when it stops, when it asks to come back."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import full_only
from tiny_run import tiny_document

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "slurm.sh"

SRUN = """#!/usr/bin/env bash
# Starts as many processes as there are tasks, hands SIGTERM on, and ends with the highest exit code.
tasks=$SLURM_NTASKS
while [[ $1 == --* ]]; do echo "$1" >>"$LOG"; [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
trap 'kill -TERM "${processes[@]}" 2>/dev/null' TERM
for ((rank = 0; rank < tasks; rank++)); do
  SLURM_STEP_NUM_TASKS=$tasks SLURM_NODEID=$rank SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & processes+=($!)
done
worst=0
for process in "${processes[@]}"; do
  wait "$process"; code=$?
  while kill -0 "$process" 2>/dev/null; do wait "$process"; code=$?; done
  [ $code -gt $worst ] && worst=$code
done
exit $worst
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$LOG"
[ "$1" = show ] && printf '127.0.0.1\\nother\\n'
exit 0
"""
SQUEUE = """#!/usr/bin/env bash
for format; do :; done
echo "squeue $format" >>"$LOG"
sleep "${QUEUE_TAKES:-0}"
if [ "$format" = %L ]; then echo " ${LEFT:-UNLIMITED}"; else echo "${STATE:-RUNNING} "; fi
"""
STOKER = """#!/usr/bin/env bash
echo "stoker $SLURM_PROCID $MASTER_ADDR:$MASTER_PORT $*" >>"$LOG"
trap 'kill "$wait_for"; exit 143' TERM
sleep "${TAKES:-0}" & wait_for=$!
wait "$wait_for"
exit "${ENDS:-0}"
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder with the commands, and the environment of a job of two tasks on one machine."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "stoker": STOKER}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "2",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def job(cluster, tmp_path):
    """Starts the script in a session of its own, which ends with the test; its output goes to `output`."""
    started = []

    def start(*arguments, **more):
        with (tmp_path / "output").open("a") as output:
            process = subprocess.Popen(
                ["bash", str(SCRIPT), *arguments],
                env=cluster | more,
                cwd=tmp_path,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def log_of(environment):
    path = Path(environment["LOG"])
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition):
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_process_gets_its_rank_the_place_to_meet_and_the_limits(cluster, job):
    run = job("experiment=mine", "a=b c", LEFT="1-02:03:04", SLURM_CPUS_PER_TASK="3")
    assert run.wait(600) == 0
    lines = log_of(cluster)
    port = 20_000 + os.getpid() % 20_000
    limit = "exp_manager.max_time_per_run='01:01:53:04'"  # ten minutes less
    words = (
        f"train trainer.num_nodes=1 trainer.devices=2 exp_manager.resume_if_exists=true {limit} experiment=mine a=b c"
    )
    assert {line for line in lines if line.startswith("stoker")} == {
        f"stoker {rank} 127.0.0.1:{port} {words}" for rank in range(2)
    }
    assert [line for line in lines if line.startswith("--")] == [
        "--ntasks=2",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=3",
    ]
    assert not any("requeue" in line for line in lines)


@pytest.mark.parametrize("word", ["trainer.max_restarts=2", "+trainer.min_nodes=1", "--restart=1"])
def test_restarts_are_those_of_one_agent_on_each_node(cluster, job, word):
    run = job("experiment=mine", word, SLURM_JOB_NUM_NODES="2", SLURM_NTASKS="8", SLURM_CPUS_PER_TASK="3")
    assert run.wait(600) == 0
    lines = log_of(cluster)
    words = f"train trainer.num_nodes=2 trainer.devices=4 exp_manager.resume_if_exists=true experiment=mine {word}"
    started = {line for line in lines if line.startswith("stoker")}
    assert len(started) == 2
    assert all(line.endswith(words) for line in started)
    assert [line for line in lines if line.startswith("--")] == [
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--cpus-per-task=12",
    ]


def test_an_override_of_ones_own_takes_the_place_of_the_scripts(cluster, job):
    own = ["+trainer.devices=1", "exp_manager.max_time_per_run=null", "trainer.num_nodesX=3"]
    assert job(*own, LEFT="1-02:03:04").wait(600) == 0
    words = f"train trainer.num_nodes=1 exp_manager.resume_if_exists=true {' '.join(own)}"
    started = [line for line in log_of(cluster) if line.startswith("stoker")]
    assert len(started) == 2
    assert all(line.endswith(words) for line in started)


@pytest.mark.parametrize(
    ("left", "limit"),
    [("UNLIMITED", None), ("INVALID", None), ("10:00", None), ("59:00", "00:00:49:00"), ("08:09:10", "00:07:59:10")],
)
def test_the_limit_of_the_job_becomes_that_of_the_run(cluster, job, left, limit):
    assert job(LEFT=left).wait(600) == 0
    text = "\n".join(log_of(cluster))
    assert text.count("max_time_per_run") == (2 if limit else 0)
    assert limit is None or f"max_time_per_run='{limit}'" in text


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_handed_on_and_the_job_comes_back(cluster, job, tmp_path, name):
    run = job(TAKES="60")
    wait_for(lambda: sum(line.startswith("stoker") for line in log_of(cluster)) == 2)
    run.send_signal(signal.Signals[name])
    assert run.wait(600) == 143
    assert f"scontrol requeue {os.getpid()}" in log_of(cluster)
    output = (tmp_path / "output").read_text()
    assert f"received {name}; saving and stopping" in output
    assert "requeuing the job" in output


def test_a_signal_before_the_run_starts_stops_it(cluster, job):
    run = job(TAKES="60", QUEUE_TAKES="0.5")
    wait_for(lambda: "squeue %L" in log_of(cluster))
    run.send_signal(signal.SIGTERM)
    assert run.wait(600) == 143
    assert f"scontrol requeue {os.getpid()}" in log_of(cluster)


@pytest.mark.parametrize(
    ("state", "ends"), [("CANCELLED", "143"), ("RUNNING", "0"), ("RUNNING", "2"), ("RUNNING", "1")]
)
def test_what_was_cancelled_is_done_or_failed_stays_away(cluster, job, state, ends):
    assert job(STATE=state, ENDS=ends).wait(600) == int(ends)
    assert not any("requeue" in line for line in log_of(cluster))


@full_only
def test_a_run_whose_time_was_over_comes_back(cluster, job):
    assert job(LEFT="00:03", STOKER_STOP_EARLY="1", TAKES="2.2").wait(600) == 0
    assert f"scontrol requeue {os.getpid()}" in log_of(cluster)


def test_without_slurm_it_says_what_to_do(cluster, job, tmp_path):
    del cluster["SLURM_JOB_ID"]
    run = job()
    assert run.wait(600) == 2
    assert "submit this script with sbatch" in (tmp_path / "output").read_text()


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
        return
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@full_only
def test_two_agents_train_save_at_a_signal_and_go_on(cluster, job, tmp_path):
    """Each starts its one process."""
    (tmp_path / "bin" / "stoker").write_text(f'#!/bin/sh\nexec {sys.executable} -m stoker "$@"\n')
    document = tiny_document(tmp_path / "run", model__micro_batch_size=1)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "tiny.yaml").write_text(json.dumps(document))
    metrics = tmp_path / "run" / "metrics.jsonl"
    words = ["--config-name", "tiny", "trainer.max_steps=100000", "trainer.val_check_interval=100000"]
    words += ["trainer.max_restarts=2", "exp_manager.resume_if_exists=true"]
    run = job(*words, SLURM_JOB_NUM_NODES="2")
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    os.kill(environment["processes"][1]["process"], signal.SIGKILL)
    events = tmp_path / "run" / "events.jsonl"
    wait_for(lambda: events.read_text().count('"start"') == 2)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(600) == 143
    assert f"scontrol requeue {os.getpid()}" in log_of(cluster)
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step-*")
    last = int(checkpoint.name.removeprefix("step-"))
    words[2] = f"trainer.max_steps={last + 3}"
    assert job(*words, SLURM_JOB_NUM_NODES="2").wait(600) == 0
    assert (tmp_path / "run" / "checkpoints" / f"step-{last + 3}").is_dir()


@full_only
def test_two_ranks_train_save_at_a_signal_and_go_on(cluster, job, tmp_path):
    (tmp_path / "bin" / "stoker").write_text(f'#!/bin/sh\nexec {sys.executable} -m stoker "$@"\n')
    document = tiny_document(tmp_path / "run", exp_manager__resume_if_exists=False, model__micro_batch_size=1)
    document["trainer"]["max_steps"] = 100_000
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "tiny.yaml").write_text(json.dumps(document))
    metrics = tmp_path / "run" / "metrics.jsonl"
    run = job("--config-name", "tiny", "trainer.val_check_interval=100000")
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(600) == 143
    assert f"scontrol requeue {os.getpid()}" in log_of(cluster)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [process["rank"] for process in environment["processes"]] == [0, 1]
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step-*")
    last = int(checkpoint.name.removeprefix("step-"))
    again = job("--config-name", "tiny", f"trainer.max_steps={last + 3}", "trainer.val_check_interval=100000")
    assert again.wait(600) == 0
    assert (tmp_path / "run" / "checkpoints" / f"step-{last + 3}").is_dir()
