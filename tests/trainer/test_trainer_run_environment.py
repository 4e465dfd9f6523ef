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
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "env_vars.DB_PASSWORD",
        "--api-key",
        "a.credentials",
        "key",
        "authToken",
        "env_vars.DB_PASS",
        "GITHUB_PAT",
        "passphrase",
        "PRIVATE_KEY_B64",
        "BEARER",
        "PASS",
        "MYSQL_PWD",
        "APIKey",
        "apiKeys",
        "ACCESS_TOKENS_JSON",
        "authorization",
        "SSH_PASSPHRASE",
        "sessionToken",
        "HF_TOKEN_B64",
        "PGPASSWORD",
        "SSHPASS",
        "REDISCLI_AUTH",
        "SESSION_COOKIE",
        "AWS_CREDS",
        "env_vars.HF_TOKEN.a",
    ],
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
        *("tokenizer", "max_tokens", "pass_through", "PWD", "OLD_PWD", "forward_pass", "file_pat", "author", "monkey"),
        *(
            "PRIVATE_KEY_PATH",
            "SSH_AUTH_SOCK",
            "compass",
            "bypass",
            "tokenizerPath",
            "num_passes",
            "PATH",
            "key_channels",
        ),
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


@looped(
    ("text", "kept"),
    [
        ("postgres://me:abc@host/db", "postgres://***@host/db"),
        ("https://host/x?a=1&access_token=abc&b=2", "https://host/x?a=1&access_token=***&b=2"),
        ("https://host/x?X-Amz-Signature=abc", "https://host/x?X-Amz-Signature=***"),
        ("Authorization: Bearer abcdefgh12345678", "Authorization: ***"),
        ("x ghp_abcdefghijklmnopqrstuvwxyz0123456789", "x ***"),
        ("env_vars={authToken: abc, 'DB_PASS': abc, b: 1}", "env_vars={authToken: ***, 'DB_PASS': ***, b: 1}"),
    ],
)
def test_secrets_in_values(text, kept):
    assert redaction.redact(text) == kept
    assert redaction.holds_secret(text) or "{" in text


@looped(
    "text",
    [
        "https://host/x?tokenizer=abc&max_tokens=5",
        "a@b.c",
        "basic experiment",
        "hf_llama_converted_to_stoker_format",
        "git@github.com:a/b",
        "http://host:80/a?page=1",
        "sk-learn-like-model-of-some-kind",
        "{a: 1, max_tokens: 5}",
    ],
)
def test_values_that_are_no_secrets(text):
    assert redaction.redact(text) == text


def test_variables_that_matter_are_recorded_and_secrets_are_not():
    variables = {"NVTE_FLASH_ATTN": "0", "HOME": "/root", "TORCH_API_KEY": "xyz", "NCCL_PROXY": "http://a:xyz@h"}
    document = run_environment.describe_environment(CPU, variables)
    assert document["variables"] == {"NCCL_PROXY": "http://***@h", "NVTE_FLASH_ATTN": "0", "TORCH_API_KEY": "***"}
    assert document["device"] == "cpu"
    assert "xyz" not in json.dumps(document)


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
