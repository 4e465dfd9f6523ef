"""Launchers of submitit: what a job is given and reports, the options of sbatch, and the GPUs of jobs at the same time.

sbatch is a script here that writes the exit codes of its jobs at once; `tests/full/test_sweeps.py` runs real ones.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import tiny_config, tiny_document, write_tiny_sweep

from stoker.trainer.cli import job_entry, multirun, submitit_jobs
from stoker.trainer.cli.submitit_jobs import SubmititJobs
from stoker.trainer.config.schema.hydra import LocalLauncher
from stoker.trainer.utils.errors import UserError

pytest.importorskip("submitit")

SBATCH = f"""#!{sys.executable}
import json, os, pathlib, sys
script = pathlib.Path(sys.argv[-1])
sweep = pathlib.Path("s")
with open("sbatch.txt", "a") as told:
    told.write(script.read_text())
for number in os.environ["ENDS"].split(","):
    job, code = number.split(":")
    task = json.loads((sweep / ".submitit" / f"job_{{job}}.json").read_text())
    if code != "none":
        pathlib.Path(task["exit_file"]).write_text(json.dumps({{"exit_code": int(code), "error": "e" * int(code)}}))
print("Submitted batch job 12")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny configuration and SLURM's commands, the current one."""
    monkeypatch.chdir(tmp_path)
    write_tiny_sweep(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in {"sbatch": SBATCH, "srun": "", "scancel": "", "sacct": "#!/bin/sh\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def sweep(*words, said=print):
    return multirun.sweep("tiny", None, ["hydra.sweep.dir=s", *words], lambda *_: 99, said, imports=["json"])


def test_an_array_of_slurm(here, monkeypatch, capsys):
    monkeypatch.setenv("ENDS", "0:0,1:3")
    keys = ["partition=gpu", "timeout_min=7", "mem_gb=4", "setup=['module load x']", "additional_parameters={nice: 5}"]
    said = []
    words = ["hydra/launcher=submitit_slurm", *(f"hydra.launcher.{key}" for key in keys)]
    assert sweep("model.seed=1,2", *words, "hydra.launcher.array_parallelism=2", said=said.append) == 3
    script = (here / "sbatch.txt").read_text()
    for line in ("--partition=gpu", "--time=7", "--mem=4GB", "--nice=5", "--array=0-1%2", "--ntasks-per-node=1"):
        assert f"#SBATCH {line}\n" in script
    assert "module load x" in script
    rows = json.loads((here / "s" / multirun.RECORD_FILE).read_text())["jobs"]
    assert [(row["exit_code"], row["problem"]) for row in rows] == [(0, ""), (3, "eee")]
    assert said == ["job 1: eee"]
    assert "job 1 (2 of 2): model.seed=2; slurm job 12_1" in capsys.readouterr().out
    task = json.loads((here / "s" / ".submitit" / "job_1.json").read_text())
    assert (task["imports"], task["digest"]) == (["json"], rows[1]["configuration"])
    assert task["document"]["model"]["seed"] == 2
    assert "cuda_visible_devices" not in task


def test_ctrl_c_does_not_reach_what_submitit_starts(here, monkeypatch):
    """The mask is inherited; the script of sbatch stands for any process that submitit starts."""
    monkeypatch.setenv("ENDS", "0:0")
    masks = "import signal; told.write(f'blocked {signal.pthread_sigmask(signal.SIG_BLOCK, [])}')"
    script = (here / "bin" / "sbatch").read_text()
    (here / "bin" / "sbatch").write_text(script.replace("    told.write", f"    {masks}\n    told.write", 1))
    assert sweep("hydra/launcher=submitit_slurm") == 0
    assert "<Signals.SIGINT: 2>" in (here / "sbatch.txt").read_text().partition("\n")[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_job_that_ends_without_an_exit_code(here, monkeypatch):
    monkeypatch.setenv("ENDS", "0:none")
    monkeypatch.setattr("submitit.SlurmJob.done", lambda job: True)  # asks sacct once a minute
    said = []
    assert sweep("hydra/launcher=submitit_slurm", said=said.append) == 1
    assert "the job ended without an exit code; see " in said[0]


def test_slurm_that_is_not_there(here, monkeypatch):
    for name in ("sbatch", "srun"):
        (here / "bin" / name).unlink()
    with pytest.raises(UserError, match="the jobs cannot be submitted: "):
        sweep("hydra/launcher=submitit_slurm")


def test_gpus_are_divided_among_jobs(monkeypatch):
    with pytest.raises(UserError, match="needs the number of jobs that share the GPUs"):
        SubmititJobs(LocalLauncher(gpus_per_node=2), [], print)
    for visible, devices in ((None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        jobs = SubmititJobs(LocalLauncher(gpus_per_node=2, array_parallelism=2), [], print)
        assert [jobs._devices(slot) for slot in range(2)] == devices
        assert SubmititJobs(LocalLauncher(), [], print)._devices(3) == visible


def test_a_job_reads_its_file_and_reports(tmp_path, monkeypatch):
    task = {"command": ["stoker", "x"], "imports": [], "digest": "other", "exit_file": str(tmp_path / "e")}
    task |= {"log_file": str(tmp_path / "l"), "provenance": tiny_config(tmp_path).provenance()}
    (tmp_path / "t").write_text(json.dumps({**task, "document": tiny_document(tmp_path)}))
    monkeypatch.setattr(sys, "argv", ["job_entry", str(tmp_path / "t")])
    monkeypatch.setattr(job_entry, "_write_log", lambda _: None)
    monkeypatch.setattr(job_entry, "set_handlers", lambda *_: {})
    monkeypatch.setattr(job_entry, "signal_when_parent_ends", lambda _: None)
    assert job_entry.main() == 2
    outcome = json.loads((tmp_path / "e").read_text())
    assert (outcome["exit_code"], outcome["error"][:25]) == (2, "the configuration changed")


def test_a_local_job_ends_when_its_sweep_does(monkeypatch):
    signals = []
    monkeypatch.setattr(os, "kill", lambda *given: signals.append(given))
    with submitit_jobs._locked_file() as lock:
        waits = job_entry._stop_with(lock)
        waits.join(0.2)
        assert signals == []
    waits.join(60)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    job_entry._stop_with(lock).join(60)
    assert len(signals) == 2


CANCELLED = """
import os, signal, sys
from stoker.trainer.cli import job_entry
ready = os.dup(1)
job_entry._run = lambda task, errors: print("in the log", flush=True) or os.write(ready, b"ready\\n") and signal.pause()
sys.exit(job_entry.main())
"""


def test_a_cancelled_job_reports_too(tmp_path: Path):
    task = {"command": ["stoker"], "exit_file": str(tmp_path / "e"), "log_file": str(tmp_path / "l")}
    (tmp_path / "t").write_text(json.dumps(task))
    with subprocess.Popen([sys.executable, "-c", CANCELLED, str(tmp_path / "t")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert json.loads((tmp_path / "e").read_text())["exit_code"] == 143
    assert (tmp_path / "l").read_text() == "in the log\n"
