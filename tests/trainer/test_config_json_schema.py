"""The JSON schema for editors: as generated, and of one mind with the validation of a run."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from hydra.plugins.config_source import ConfigSource
from jsonschema import Draft7Validator
from pydantic import ValidationError
from referencing import Registry, Resource
from tiers import cases, looped

from stoker.models.config.model import FAMILIES, Family
from stoker.models.config.t5 import DecoderKeys
from stoker.trainer.cli import main
from stoker.trainer.config import dotted_paths, json_schema
from stoker.trainer.config.nemo.key_states import KeyStates
from stoker.trainer.config.nemo.key_table import key_table
from stoker.trainer.config.schema.key_index import schema_blocks, schema_keys
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.config.yaml_reader import parse_yaml, read_yaml

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PRESETS = sorted(path for path in CONF.rglob("*.yaml") if CONF / "hydra" not in path.parents)
FILES = {path.name: json.loads(path.read_text()) for path in json_schema.SCHEMA_FOLDER.glob("*.json")}
REGISTRY = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in FILES.items())
VALUES = ("x", "", "1,1,1", ["x"], [0.5], [1, 2], [], {}, {"a": 1}, -1, 0, 1, 2, 0.5, 1.5, True, False, None)
REFERENCES = ("${model.hidden_size}", "a/${name}", "???")


def errors(group: str, content: Any) -> list[str]:
    schema = {"$ref": f"{group}.json"}
    return [error.message for error in Draft7Validator(schema, registry=REGISTRY).iter_errors(content)]


def of_text(group: str, text: str) -> list[str]:
    file = parse_yaml(text, Path())
    return errors(group, file.tree if file.defaults is None else file.tree | {"defaults": file.defaults})


def nested(path: str, value: Any, family: Family) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"family": family}}
    dotted_paths.put(tree, path, value)
    return tree


def test_the_shipped_files_are_those_of_the_schema() -> None:
    schema_files = json_schema.schema_files()
    shipped = {path.name: path.read_text() for path in json_schema.SCHEMA_FOLDER.iterdir()}
    assert shipped == schema_files, f"run: stoker config --schema-files {json_schema.SCHEMA_FOLDER}"
    for schema in FILES.values():
        assert schema["$schema"] == Draft7Validator.META_SCHEMA["$id"]
        Draft7Validator.check_schema(schema)
    for name, schema in FILES["stoker.json"]["definitions"].items():
        for choices in (one.get("enum", []) for one in schema.get("anyOf", [])):
            different = {(value, isinstance(value, bool)) for value in choices if not isinstance(value, list | dict)}
            assert len(choices) - sum(isinstance(value, list | dict) for value in choices) == len(different), name


def test_presets_name_their_schema_and_are_valid() -> None:
    assert len(PRESETS) > 50
    for path in PRESETS:
        package = read_yaml(path).package
        header = path.read_text().splitlines()[0 if package is None else 1]  # Hydra reads @package in the first lines
        named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", header)
        assert named, path
        group = "primary" if path.parent == CONF else path.parent.name
        assert (path.parent / named[1]).resolve() == json_schema.SCHEMA_FOLDER / f"{group}.json"
        assert of_text(group, path.read_text()) == [], path
        if group != "primary":
            assert (package or group).removeprefix("_global_") == json_schema.GROUPS[group]


def test_hydra_reads_the_package_above_the_header() -> None:
    for path in PRESETS:
        header = ConfigSource._get_header_dict(path.read_text()[:512])
        assert header == {"package": read_yaml(path).package}, path


@pytest.mark.parametrize("family", FAMILIES)
def test_types_are_those_of_a_run(family: Family) -> None:
    """A value of a key that acts is valid exactly where pydantic accepts it, or if it is an interpolation."""
    wrong: list[str] = []
    keys = schema_keys(family)
    for path in cases([path for path in keys if path != "model.family"], 25):
        for value in [*cases([*VALUES, *keys[path].choices], 9), keys[path].default]:
            if keys[path].extends and isinstance(value, str) and value:
                continue  # whether a component has the name is known when it is registered
            tree = nested(path, value, family)
            try:
                RootBlock.model_validate(tree)
                accepted = True
            except ValidationError:
                accepted = False
            if accepted == bool(errors("primary", tree)):
                wrong.append(f"{path}={value!r}: a run {'accepts' if accepted else 'rejects'} it")
        wrong += [f"{path}={value}" for value in REFERENCES if errors("primary", nested(path, value, family))]
    assert wrong == []


@pytest.mark.parametrize("family", cases(FAMILIES, fast=2))
def test_keys_without_effect_take_what_a_run_takes(family: Family) -> None:
    """Of a key that does not act the values that change nothing are valid, unless that depends on another key."""
    wrong: list[str] = []
    for row in cases(key_table().values(), 25):
        path = row.pattern.replace(".*", ".some")
        acts = path in schema_keys(family) or path in schema_blocks(family)
        acts = acts or (family == "t5" and row.pattern.removeprefix("model.") in DecoderKeys.model_fields)
        for value in () if acts else (*VALUES[:4], *VALUES[-8:], *row.accepts):
            tree = nested(path, value, family)
            accepted = not any(verdict.error for verdict in KeyStates(tree, str).verdicts)
            found = errors("primary", tree)
            if type(value) is int and any(type(other) is float and value == other for other in row.accepts):
                continue  # 1 is 1.0 in JSON
            if (found and accepted) or not (found or accepted or row.same_as or row.switch):
                wrong.append(f"{path}={value!r}: a run {'accepts' if accepted else 'rejects'} it")
    assert wrong == []


@looped(
    ("group", "text", "found"),
    [
        ("primary", "trainer: {max_step: 5}", "'max_step' was unexpected"),
        ("primary", "trainer: {max_steps: '5'}", "'5'"),
        ("primary", "model: {family: gtp}", "'gtp'"),
        ("primary", "model: {defaults: [x]}", "'defaults' was unexpected"),
        ("experiment", "model: {optim: {sched: {warmup_ratio: 2}}}", "2 is greater than the maximum of 1"),
        ("peft", "model: {peft: {peft_scheme: lorra}}", "'lorra'"),
        ("model", "family: gpt\nnum_layer: 3", "'num_layer' was unexpected"),
        ("model", "family: gpt\nencoder: {num_layers: 3}", "3"),
        ("model", "family: t5\nencoder: {num_layer: 3}", "'num_layer' was unexpected"),
        ("model", "hidden_size: 0", "0 is less than the minimum of 1"),
        ("model", "fp8: 8", "8"),
        ("data", "model: {data: {path: x}}", "'model' was unexpected"),
        ("data", "packed_sequence: 1", "1 is not of type 'boolean', 'string'"),
        ("tokenizer", "library: 5", "5"),
        ("optim", "betas: [0.9]", "[0.9] is too short"),
        ("optim", "betas: [0.9, 1.0]", "1.0 is greater than or equal to the maximum of 1"),
        ("trainer", "max_time: tomorrow", "'tomorrow' does not match"),
    ],
)
def test_mistakes_are_errors(group: str, text: str, found: str) -> None:
    messages = of_text(group, text)
    assert any(found in message for message in messages), messages


@looped(
    ("group", "text"),
    [
        (
            "primary",
            "defaults: [_self_, {model: gpt_tiny}, {override /optim: null}, {data: [a, b]}]\nname: ${oc.env:X}",
        ),
        ("primary", "env_vars: {NVTE_FUSED_ATTN: 1, A: x}\nhydra: {run: {dir: x}}\nmodel: {fp8: false}"),
        ("model", "defaults: [gpt_tiny]\nencoder: {num_layers: 3}\nfamily: t5"),
        ("model", "encoder_seq_length: 8\nnum_layers: ${sum:${.a},-1}"),
        ("optim", "betas: [0.9, '${x}']\nlr: ???\nsched: {warmup_steps: 0.5}"),
    ],
)
def test_what_a_run_reads_is_valid(group: str, text: str) -> None:
    assert of_text(group, text) == []


@looped("defaults", [{"model": "a"}, "model", [1], [""], [{}], [{"model": "a", "data": "b"}], [{"a": 1}], [{"a": [1]}]])
def test_wrong_defaults_lists_are_errors(defaults: Any) -> None:
    for group in json_schema.GROUPS:
        assert errors(group, {"defaults": defaults}) != []


def test_the_schema_of_a_users_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "--schema-files", str(tmp_path / "schema")]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "schema").iterdir()} == {
        path.name: path.read_text() for path in json_schema.SCHEMA_FOLDER.iterdir()
    }
    for group in json_schema.GROUPS:
        assert main.main(["config", "--schema-path", *([group] if group != "primary" else [])]) == 0
        assert json.loads(Path(capsys.readouterr().out.rstrip("\n")).read_text()) == FILES[f"{group}.json"]
    assert main.main(["config", "--schema-path", "modle"]) == 2
    assert "primary, experiment, peft" in capsys.readouterr().err


@pytest.mark.parametrize("family", cases(FAMILIES, fast=1))
def test_one_family_in_one_document(family: Family) -> None:
    schema = json.loads(json_schema.as_json_schema(family))
    Draft7Validator.check_schema(schema)
    validator = Draft7Validator(schema)
    for path, key in cases(schema_keys(family).items(), 20):
        tree: dict[str, Any] = {}
        dotted_paths.put(tree, path, key.default)
        assert validator.is_valid(tree), path
        dotted_paths.put(tree, f"{path}_", key.default)
        assert not validator.is_valid(tree), path


@looped(
    ("text", "count"),
    [
        ("hydra: {run: {dir: x}, mode: MULTIRUN, job: {name: x}, verbose: true}", 0),
        ("hydra: {launcher: {partition: x, timeout_min: 3, array_parallelism: null}}", 0),
        ("hydra: {sweeper: {n_trials: 3, sampler: {seed: 1, sigma0: 0.5}, params: {model.seed: 1, optim: 'a,b'}}}", 0),
        ("hydra: {sweeper: {_target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper}}", 0),
        ("hydra: {swep: {dir: x}}", 1),
        ("hydra: {sweep: {dri: x}}", 1),
        ("hydra: {launcher: {partitoin: x}}", 1),
        ("hydra: {launcher: {timeout_min: x}}", 1),
        ("hydra: {sweeper: {n_trails: 3}}", 1),
        ("hydra: {sweeper: {sampler: {sed: 3}}}", 1),
        ("hydra: {mode: MULTI}", 1),
    ],
)
def test_block_of_hydra(text: str, count: int) -> None:
    assert len(of_text("primary", text)) == count


def test_files_refer_to_each_other_by_their_place() -> None:
    """As docs/configuration.md says."""

    def read(uri: str) -> Resource[Any]:
        return Resource.from_contents(json.loads(Path(urlparse(uri).path).read_text()))

    schema = {"$ref": (json_schema.SCHEMA_FOLDER / "primary.json").as_uri()}
    validator = Draft7Validator(schema, registry=Registry(retrieve=read))  # pyrefly: ignore[unexpected-keyword]
    assert not [*validator.iter_errors({"name": "x"})]
    assert [*validator.iter_errors({"nmae": "x"})]
