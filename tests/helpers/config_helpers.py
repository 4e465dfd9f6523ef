"""Short forms for tests of the configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.problems import ConfigError, Problem
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.root import ModelBlock, RootBlock
from stoker.trainer.utils.errors import EXIT_BAD_INPUT

DATA = Path(__file__).parents[1] / "data"


def load(
    *overrides: str, name: str | None = None, directory: Path | None = None, environ: Mapping[str, str] | None = None
) -> RunConfig:
    """Compose and validate with an environment of its own; of a key that is given more than once, the last counts."""
    return load_run_config(name, directory, last_of_each(overrides), environ or {})


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Overrides over others: a command line must not give a key twice."""
    last = {word.lstrip("+").partition("=")[0]: at for at, word in enumerate(overrides)}
    return [word for at, word in enumerate(overrides) if last[word.lstrip("+").partition("=")[0]] == at]


def gpt(root: RootBlock) -> ModelBlock:
    """The keys of a model that must be a GPT."""
    assert isinstance(root.model, ModelBlock)
    return root.model


def problems(
    *overrides: str, name: str | None = None, directory: Path | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, Problem]:
    """The problems of a configuration that must be refused, by key."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(name, directory, overrides, environ or {})
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return {problem.key: problem for problem in caught.value.problems}


def write(folder: Path, name: str, text: str) -> Path:
    """A YAML file below `folder`."""
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
