"""Ranks that share a model generate and evaluate as one process does."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork_server import ForkServer
from tiers import extra, full_only
from tiny_run import tiny_config

from stoker.models.parallel.layout import ParallelLayout
from stoker.trainer.cli.main import main
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, UserError

MODEL: dict[str, Any] = {
    "trainer__max_steps": 2, "trainer__val_check_interval": 2, "model__num_attention_heads": 4, "model__bias": False,
    "model__num_layers": 3, "model__hidden_dropout": 0.0, "model__attention_dropout": 0.0,
}  # fmt: skip
STACK = {
    "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "bias": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
T5: dict[str, Any] = {
    "trainer__max_steps": 2,
    "trainer__val_check_interval": 2,
    "model": {
        "family": "t5",
        "seq_length": 16,
        "encoder": STACK,
        "decoder": STACK | {"num_layers": 2, "num_query_groups": 2},
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "data": {"data_impl": "mock", "seq_length_dec": 12},
        "optim": {"lr": 1e-2, "sched": {"max_steps": 100, "warmup_steps": 2}},
    },
}
GROUPED = {"model__num_query_groups": 1, "model__position_embedding_type": "rope", "model__activation": "fast-swiglu"}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": MODEL | GROUPED,
    "t5": T5,
    **dict(
        extra(
            (
                "experts",
                MODEL
                | {
                    "model__num_moe_experts": 4,
                    "model__moe_layer_freq": [0, 0, 1],
                    "model__moe_expert_capacity_factor": 1.0,
                    "model__position_embedding_type": "kerple",
                },
            ),
            ("alibi", MODEL | {"model__position_embedding_type": "alibi", "model__logits_soft_cap": 4.0}),
            ("relative", MODEL | {"model__position_embedding_type": "relative"}),
            ("bert", MODEL | {"model__family": "bert"}),
            ("lora", MODEL | {"model__peft__peft_scheme": "lora"}),
            ("ptuning", MODEL | {"model__peft__peft_scheme": "ptuning", "model__max_position_embeddings": 32}),
        )
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in MODELS.items():
        run_training(tiny_config(folder / name, **changes))
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path], forks: ForkServer) -> dict[str, dict[str, Any]]:
    return answers(forks, Path(), checkpoints)


def answers(
    forks: ForkServer, folder: Path, models: dict[str, Path], ranks: int = 1, stages: int = 1, *, ema: bool = False
) -> dict[str, dict[str, Any]]:
    paths = [str(path) for path in models.values()]
    found = forks.call("inference_ranks_runs", "results", str(folder), paths, ranks, stages, ema)
    return dict(zip(models, found, strict=True))


def check_equal(together: dict[str, dict[str, Any]], alone: dict[str, dict[str, Any]], rel: float = 0.0) -> None:
    """Compare answers; those of stages alone are equal in every bit."""
    for name, found in together.items():
        wanted = dict(alone[name])
        assert found.pop("loss") == pytest.approx(wanted.pop("loss"), rel=rel, abs=0.0), name
        assert found.pop("weights") < 0.9 * wanted.pop("weights"), name
        assert found == wanted, name


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 2), *extra((4, 2))])
def test_ranks_answer_as_one_process(
    checkpoints: dict[str, Path],
    alone: dict[str, dict[str, Any]],
    forks: ForkServer,
    tmp_path: Path,
    ranks: int,
    stages: int,
) -> None:
    rel = 0.0 if ranks == stages else 1e-5
    check_equal(answers(forks, tmp_path, checkpoints, ranks, stages), alone, rel)


@full_only
def test_stages_load_folders_adapters_and_averages(forks: ForkServer, tmp_path: Path) -> None:
    from adapter_runs import base_folder, finetune

    averaged = ["exp_manager.ema.enable=true", "exp_manager.ema.decay=0.5", "trainer.max_steps=3"]
    base = base_folder("llama", tmp_path / "llama")
    finetune(base, tmp_path / "adapter", *averaged, "model.peft.lora_tuning.row_init_method=normal")
    finetune(base, tmp_path / "whole", *averaged, peft=None)
    runs = {name: tmp_path / name for name in ("adapter", "whole")}
    plain = {**runs, "llama": base}
    for models, ema in ((plain, False), (runs, True)):
        folder = tmp_path / f"ranks-{ema}"
        folder.mkdir()
        check_equal(answers(forks, folder, models, 2, 2, ema=ema), answers(forks, folder, models, ema=ema))


@pytest.mark.parametrize(
    ("variables", "command", "said"),
    [
        (
            {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "generate",
            "RANK (x) must be a number",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "generate", "MASTER_ADDR and MASTER_PORT must name"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "evaluate --tasks arc_easy",
            "start stoker evaluate without torchrun",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "generate --pipeline-parallel 3",
            "--pipeline-parallel 3 must divide the number of processes (2); start",
        ),
        ({}, "generate --pipeline-parallel 2", "--pipeline-parallel 2 must divide the number of processes (1); start"),
        ({}, "evaluate --tasks arc_easy --pipeline-parallel 2", "leave it out with --tasks"),
    ],
)
def test_ranks_that_cannot_be_are_told(
    checkpoints: dict[str, Path],
    variables: dict[str, str],
    command: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    verb, *options = command.split()
    assert main([verb, str(checkpoints["grouped"]), *options]) == EXIT_BAD_INPUT
    assert said in capsys.readouterr().err


def test_stages_have_layers(checkpoints: dict[str, Path]) -> None:
    ranks: Any = SimpleNamespace(layout=ParallelLayout(pipeline=3))
    with pytest.raises(
        UserError, match=r"--pipeline-parallel 3 must be at most 2, the layers of a stack of checkpoint"
    ):
        load_model(checkpoints["t5"], "cpu", ranks=ranks)


@full_only
def test_torchrun_starts_them(checkpoints: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = [str(checkpoints["grouped"]), "--device", "cpu"]
    several = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    generate = ["generate", "--prompt", "To be", "--temperature", "0", "--max-new-tokens", "8"]
    for verb, stages in ((generate, "1"), (["evaluate"], "2")):
        command = ["-m", "stoker", verb[0], *given, *verb[1:]]
        alone = subprocess.run([sys.executable, *command], capture_output=True, check=True)
        shared = [*several, *command, "--pipeline-parallel", stages]
        assert subprocess.run(shared, capture_output=True, check=True).stdout == alone.stdout
