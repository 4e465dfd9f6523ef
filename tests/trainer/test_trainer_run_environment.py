"""The record of the environment of a run, without secrets."""

import json
import os
import subprocess

import torch
from tiers import looped

from stoker.trainer.checkpoint import run_environment
from stoker.trainer.utils import redaction

CPU = torch.device("cpu")


@looped(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "env_vars.DB_PASSWORD", "--api-key", "a.credentials", "key"],
)
def test_names_of_secrets(name):
    assert redaction.is_secret(name)


@looped(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "model.apply_query_key_layer_scaling",
        "model.tokenizer.special_tokens.bos_token",
        "keyboard",
        "model.moe_token_dropping",
        "model.hidden_size",
        "model.data.label_key",
        "model.data.train_ds.context_key",
    ],
)
def test_names_of_no_secrets(name):
    assert not redaction.is_secret(name)


def test_a_command_line_is_kept_but_for_its_secrets():
    words = [
        "stoker", "train", "model.hidden_size=64", "++env_vars.WANDB_API_KEY=abc", "--token", "abc", "--token=abc",
        "a=https://me:abc@host/x", "--quiet", "name=a=b",
    ]  # fmt: skip
    kept = redaction.redact_arguments(words)
    assert "abc" not in " ".join(kept)
    assert kept == [
        "stoker", "train", "model.hidden_size=64", "++env_vars.WANDB_API_KEY=***", "--token", "***", "--token=***",
        "a=https://***@host/x", "--quiet", "name=a=b",
    ]  # fmt: skip


def test_variables_that_matter_are_recorded_and_secrets_are_not():
    variables = {"NVTE_FLASH_ATTN": "0", "HOME": "/root", "TORCH_API_KEY": "abc", "NCCL_PROXY": "http://a:abc@h"}
    document = run_environment.describe_environment(CPU, variables)
    assert document["variables"] == {"NCCL_PROXY": "http://***@h", "NVTE_FLASH_ATTN": "0", "TORCH_API_KEY": "***"}
    assert document["device"] == "cpu"
    assert "abc" not in json.dumps(document)


def git(directory, *words):
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(["git", *words], cwd=directory, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_project_is_its_commit_and_what_differs_from_it(tmp_path):
    below = tmp_path / "project" / "below"
    below.mkdir(parents=True)
    project = below.parent
    git(project, "init", "-q")
    (project / "file").write_text("a")
    git(project, "add", "file")
    git(project, "commit", "-q", "-m", "first")
    commit = git(project, "rev-parse", "HEAD")
    assert run_environment.describe_project(below) == {"directory": str(below), "commit": commit, "changed": 0}
    (project / "file").write_text("b")
    (project / "untracked").write_text("b")
    assert run_environment.describe_project(below)["changed"] == 1
    git(project, "checkout", "-q", "--detach")
    assert run_environment.head_commit(project) == commit
    git(project, "checkout", "-q", "-b", "branch")
    git(project, "pack-refs", "--all")
    assert run_environment.head_commit(project) == commit
    linked = tmp_path / "linked"
    git(project, "worktree", "add", "-q", str(linked), "-b", "other")
    assert run_environment.head_commit(linked) == commit


def test_no_project_and_no_git(tmp_path, monkeypatch):
    assert run_environment.describe_project(tmp_path) == {"directory": str(tmp_path)}
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert run_environment.describe_project(tmp_path) == {"directory": str(tmp_path), "commit": None, "changed": None}


def test_a_repository_cannot_have_git_start_its_own_program(tmp_path):
    git(tmp_path, "init", "-q")
    marker = tmp_path / "marker"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(program))
    assert run_environment.describe_project(tmp_path)["changed"] == 0
    assert not marker.exists()
