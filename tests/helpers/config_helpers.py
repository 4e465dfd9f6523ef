"""Helpers for tests of the configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.nemo.key_table import KeyState
from stoker.trainer.config.problems import ConfigError, Problem
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.root import ModelBlock, RootBlock
from stoker.trainer.utils.errors import EXIT_BAD_INPUT

DATA = Path(__file__).parents[1] / "data"


def load(
    *overrides: str, name: str | None = None, directory: Path | None = None, environ: Mapping[str, str] | None = None
) -> RunConfig:
    """Compose and validate with its own environment variables; the last override of a key takes effect."""
    return load_run_config(name, directory, keep_last_overrides(overrides), environ or {})


def keep_last_overrides(overrides: Sequence[str]) -> list[str]:
    """Keep only the last override of each key, as a command line must not set a key twice."""
    keys = [override.lstrip("+").partition("=")[0] for override in overrides]
    last = {key: index for index, key in enumerate(keys)}
    return [override for index, override in enumerate(overrides) if last[keys[index]] == index]


def historical(config: RunConfig) -> set[str]:
    """Return the given keys that are accepted and have no effect."""
    return {row.path for row in config.key_reports if row.state is KeyState.HISTORICAL}


def gpt(root: RootBlock) -> ModelBlock:
    """Return the model's keys, asserting that it is a GPT."""
    assert isinstance(root.model, ModelBlock)
    return root.model


def problems(
    *overrides: str, name: str | None = None, directory: Path | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, Problem]:
    """Return the problems of an invalid configuration by key, asserting that it raises."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(name, directory, overrides, environ or {})
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return {problem.key: problem for problem in caught.value.problems}


def write(folder: Path, name: str, text: str) -> Path:
    """Write a YAML file below `folder` and return its path."""
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
