"""Every command of docs/distributed.md and docs/resume.md runs, shrunk, with stand-ins for schedulers.

Blocks of `sh` and `bash` are given to a shell in whose PATH `stoker`, `torchrun`, `sbatch` and `kubectl` are small
scripts: the first two add overrides that shrink a run and start what the page starts, on this machine.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import test_scripts_slurm as slurm

ROOT = Path(__file__).resolve().parents[2]
SHRINK = (
    "trainer.accelerator=cpu trainer.devices=2 trainer.limit_val_batches=1 model.micro_batch_size=1 "
    "model.global_batch_size=4 model.encoder_seq_length=32"
)
STEPS = "trainer.max_steps=${STEPS:-2}"
STOKER = f"""#!/usr/bin/env bash
verb=$1; shift
echo "$verb $*" >>"$RAN"
[ "$verb" = train ] || exec {sys.executable} -m stoker "$verb" "$@"
exec {sys.executable} -m stoker train "$@" {SHRINK} {STEPS}
"""
TORCHRUN = f"""#!/usr/bin/env bash
[ "$1 $3 $4" = "--nproc-per-node -m stoker" ] || exit 9
verb=$5; shift 5
echo "torchrun $verb" >>"$RAN"
exec {sys.executable} -m torch.distributed.run --nproc-per-node 2 --master-port "$PORT" -m stoker \\
  "$verb" "$@" {SHRINK} {STEPS}
"""
SBATCH = """#!/usr/bin/env bash
nodes=1
while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#*=}; shift; done
script=$1; shift
echo "sbatch $script" >>"$RAN"
export SLURM_JOB_ID=$PORT SLURM_JOB_NUM_NODES=$nodes SLURM_JOB_NODELIST=here SLURM_NTASKS=$((2 * nodes))
exec bash "$ROOT/$script" "$@" trainer.devices=2
"""
KUBECTL = f"""#!/usr/bin/env bash
[ "$1 $2" = "apply -f" ] || exit 9
echo "kubectl $3" >>"$RAN"
exec {sys.executable} -c 'import sys, yaml; list(yaml.safe_load_all(open(sys.argv[1])))' "$ROOT/$3"
"""


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def together(block: str) -> str:
    """Let the lines that start one run on several nodes run side by side."""
    lines = block.replace("\\\n", " ").replace(" &\n", "\n").splitlines()
    nodes = [line for line in lines if line.startswith("MASTER_ADDR=")]
    if not nodes:
        return block
    assert nodes == lines
    return " &\n".join(nodes) + ' &\ncodes=0; for job in $(jobs -p); do wait "$job" || codes=1; done; exit $codes\n'


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """A folder with the commands and what the pages take for granted: an experiment `mine`, a run `first`."""
    stubs = {"stoker": STOKER, "torchrun": TORCHRUN, "sbatch": SBATCH, "kubectl": KUBECTL}
    local = "SLURM_LOCALID=$((rank % (tasks / SLURM_JOB_NUM_NODES)))"
    stubs |= {
        "srun": slurm.SRUN.replace("SLURM_LOCALID=$rank", local),
        "scontrol": slurm.SCONTROL,
        "squeue": slurm.SQUEUE,
    }
    (tmp_path / "bin").mkdir()
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    experiment = {"defaults": [{"override /model": "gpt_tiny"}, {"override /data": "mock"}]}
    experiment |= {"exp_manager": {"name": "mine", "create_tensorboard_logger": False}}
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\n" + json.dumps(experiment))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "RAN": str(tmp_path / "ran"),
        "ROOT": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("page", ["distributed.md", "resume.md"])
def test_every_command_of_the_page_runs(page, shell, tmp_path):
    failed: list[str] = []
    for block in blocks(page):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        text = together(block).replace("MASTER_ADDR=node0", "MASTER_ADDR=127.0.0.1").replace("=29400", f"={port}")
        done = subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=tmp_path,
            env=shell | {"PORT": port},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        print(f"{done.returncode}: {block}", flush=True)
        if done.returncode:
            failed.append(f"{block}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    assert not failed, "\n\n".join(failed)
    ran = (tmp_path / "ran").read_text()
    kinds = {"distributed.md": ["train", "torchrun", "sbatch", "kubectl", "plan"], "resume.md": ["train"]}
    assert all(re.search(rf"^{kind} ", ran, re.MULTILINE) for kind in kinds[page]), ran
