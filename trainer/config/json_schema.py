"""JSON schema (draft 7) of configuration files, for editors: in `schema/json/`, and `stoker config --schema`.

`stoker.json` holds every definition; a file for each config group refers to it. Definitions are named after the path of
the key. Every value may also be an interpolation or `???`. Keys that do not act have their state in the description and
accept only the values that change nothing. Cross-field rules are not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...models.config.key_block import ConfigBlock
from ...models.config.model import FAMILIES, Family
from ...models.config.t5 import DecoderKeys
from ..utils.errors import UserError
from ..utils.text import one_line
from . import dotted_paths
from .nemo.key_table import KeyRow, KeyState, key_table
from .schema import hydra
from .schema.key_index import STACKS, without_stack
from .schema.root import MODEL_BLOCKS, RootBlock

DRAFT = "http://json-schema.org/draft-07/schema#"
SCHEMA_FOLDER = Path(__file__).resolve().parent / "schema" / "json"
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "primary": "",
        "experiment": "",
        "peft": "",
        "trainer": "trainer",
        "model": "model",
        "data": "model.data",
        "tokenizer": "model.tokenizer",
        "optim": "model.optim",
    }
)
"""The block at the root of a group's files, by their `# @package`; `primary`: train.yaml and finetune.yaml."""

Schema = dict[str, Any]
_REFERENCE = r"\$\{|^\?\?\?$"
_NO_TEXT = "must not be text, except for ${...} or ???"
_INTERPOLATION: Schema = {"$ref": "#/definitions/interpolation"}
_ANY_FAMILY = "any"
_OWN = f"{KeyState.ACTS.value} (own key): "
_INACTIVE_BLOCK = ["object", "null"]
"""Type of a block that holds keys that do not act."""
_SHARED: Mapping[str, Schema] = MappingProxyType(
    {
        "interpolation": {
            "description": "An interpolation such as ${model.hidden_size}, or ???: to be given on the command line.",
            "type": "string",
            "pattern": _REFERENCE,
        },
        "defaults": {
            "description": "Hydra's defaults list: the files merged before this one, and `_self_` for its own place.",
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {
                        "type": "object",
                        "minProperties": 1,
                        "maxProperties": 1,
                        "additionalProperties": {
                            "type": ["string", "null", "array"],
                            "minLength": 1,
                            "items": {"type": "string", "minLength": 1},
                        },
                    },
                ]
            },
        },
    }
)


def schema_files() -> dict[str, str]:
    """Return the text of each schema file by name: `stoker.json`, and one for each group."""
    trees: dict[Family, Schema] = {family: _family_tree(family) for family in FAMILIES}
    definitions = _Definitions()
    for group, package in GROUPS.items():
        definitions.add(f"{group}.yaml", _file_schema(package, trees, definitions))
    files = {"stoker.json": _dump({"$schema": DRAFT, "title": "stoker configuration"}, definitions.schemas)}
    for group in GROUPS:
        files[f"{group}.json"] = _dump({"$schema": DRAFT, "$ref": f"stoker.json#/definitions/{group}.yaml"})
    return files


def as_json_schema(family: Family = "gpt") -> str:
    """Return the JSON schema of a family's primary files, as one document."""
    definitions = _Definitions()
    trees: dict[Family, Schema] = {family: _family_tree(family)}
    root = _file_schema("", trees, definitions)
    return _dump({"$schema": DRAFT, "title": "stoker configuration", **root}, definitions.schemas)


def schema_path(group: str) -> Path:
    """Return the packaged schema file of a config group.

    Raises:
        UserError: there is none.
    """
    if group not in GROUPS:
        raise UserError(f"--schema-path {group}: there is no schema of that name; choose one of {', '.join(GROUPS)}")
    return SCHEMA_FOLDER / f"{group}.json"


def write_schema_files(folder: Path) -> None:
    """Write the schema files into a folder, which is created if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schema_files().items():
        (folder / name).write_text(text, encoding="utf-8")


def _dump(head: Schema, definitions: Mapping[str, Schema] | None = None) -> str:
    """Return JSON with each definition on a line of its own."""
    parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    if definitions is not None:
        rows = (f"  {json.dumps(name)}: {json.dumps(definitions[name])}" for name in sorted(definitions))
        parts.append(' "definitions": {\n' + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


class _Definitions:
    """Definitions by name; equal ones of several families and stacks are one."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = dict(_SHARED)

    def add(self, name: str, schema: Schema) -> Schema:
        """Return a reference to a definition, under `name` or, if another schema has that, `name@2`, `name@3`, ..."""
        first, count = name, 1
        while self.schemas.setdefault(name, schema) != schema:
            count += 1
            name = f"{first}@{count}"
        return {"$ref": f"#/definitions/{name}"}


# ------------------------------------------------------------------------------------------------ blocks and files


def _file_schema(package: str, trees: Mapping[Family, Schema], definitions: _Definitions) -> Schema:
    """Return the schema of a file: the block at `package`, and a defaults list."""
    if package == "model":
        return _model_schema(trees, definitions, is_file=True)
    block = next(iter(trees.values()))
    for name in package.split(".") if package else ():
        block = block["properties"][name]
    return _with_defaults_list(_block_schema(block, package, trees, definitions))


def _with_defaults_list(block: Schema) -> Schema:
    return {**block, "properties": {"defaults": {"$ref": "#/definitions/defaults"}, **block["properties"]}}


def _block_schema(block: Schema, path: str, trees: Mapping[Family, Schema], definitions: _Definitions) -> Schema:
    """Return a block whose properties are references to definitions."""
    properties: Schema = {}
    for name, schema in block["properties"].items():
        below = dotted_paths.join(path, name)
        if below == "model":
            schema = _model_schema(trees, definitions)
        elif "properties" in schema:
            schema = _block_schema(schema, below, trees, definitions)
        properties[name] = definitions.add(without_stack(below), schema)
    return {**block, "properties": properties}


def _model_schema(trees: Mapping[Family, Schema], definitions: _Definitions, is_file: bool = False) -> Schema:
    """Return the model block of the family that a file names, or with the keys of every family if it names none."""
    blocks: dict[str, Schema] = {family: tree["properties"]["model"] for family, tree in trees.items()}
    if len(blocks) > 1:
        blocks[_ANY_FAMILY] = _union(list(blocks.values()))
    references: list[Schema] = []
    for family, block in blocks.items():
        schema = _block_schema(block, "model", trees, definitions)
        name = f"model{'.yaml' * is_file}@{family}"
        references.append(definitions.add(name, _with_defaults_list(schema) if is_file else schema))
    chosen: Schema = references.pop()
    for family, reference in zip(trees, references, strict=False):
        is_named = {"properties": {"family": {"const": family}}, "required": ["family"]}
        chosen = {"if": is_named, "then": reference, "else": chosen}
    return chosen


def _union(blocks: list[Schema]) -> Schema:
    """Return a block with the keys of several; a key that acts in one of them acts."""
    properties: Schema = {}
    for name in dict.fromkeys(name for block in blocks for name in block["properties"]):
        found = [block["properties"][name] for block in blocks if name in block["properties"]]
        acting = [schema for schema in found if _acts(schema)] or found
        bare = [{key: schema[key] for key in schema if key not in ("default", "description")} for schema in acting]
        if all("properties" in schema for schema in acting):
            properties[name] = acting[0] if acting.count(acting[0]) == len(acting) else _union(acting)
        elif acting.count(acting[0]) == len(acting):
            properties[name] = acting[0]
        else:
            different = [schema for index, schema in enumerate(bare) if schema not in bare[:index]]
            takes = different[0] if len(different) == 1 else {"anyOf": different}
            properties[name] = {"description": acting[0]["description"], **takes}
    return {**blocks[0], "properties": properties}


def _acts(schema: Schema) -> bool:
    return schema["description"].startswith((f"{KeyState.ACTS.value}: ", _OWN))


# ------------------------------------------------------------------------------------------------ keys


def _family_tree(family: Family) -> Schema:
    """Return the schema of a family's keys as nested blocks, with the keys that do not act."""
    document = RootBlock.model_json_schema()
    document["properties"]["model"] = {"$ref": f"#/$defs/{MODEL_BLOCKS[family].__name__}"}
    tree = _expand(document, document["$defs"])
    model = tree["properties"]["model"]["properties"]
    if family == "t5":
        stacks = [tree["properties"]["model"]["properties"][stack.rpartition(".")[2]] for stack in STACKS["t5"]]
        for name in DecoderKeys.model_fields:
            *_, key = (stack["properties"][name] for stack in reversed(stacks) if name in stack["properties"])
            both = {"description": "acts on encoder and decoder, with a warning; set it in their blocks."}
            model.setdefault(name, both | {word: key[word] for word in key if word not in ("description", "default")})
    for row in key_table().values():
        for path in _places(row.pattern, family):
            _insert(tree, path.split("."), row)
    tree["properties"]["hydra"] = _hydra_block()
    return tree


def _hydra_block() -> Schema:
    """Return the schema of `hydra:`; a launcher or sweeper has the keys of all, since a group may choose it."""
    launcher = _any_of(hydra.LAUNCHERS)
    sweeper = _any_of(hydra.SWEEPERS)
    sweeper["properties"]["sampler"] = _any_of(hydra.SAMPLERS)
    text: Schema = {"type": ["string", "integer", "null"]}
    block: Schema = {
        "run": _closed({"dir": text}),
        "sweep": _closed({"dir": text, "subdir": text}),
        "mode": {"anyOf": [{"enum": ["RUN", "MULTIRUN", None]}, _INTERPOLATION]},
        "launcher": launcher,
        "sweeper": sweeper,
        "job": _closed({"name": text, **{name: {} for name in ("config", "chdir", "env_set", "env_copy")}}),
    }
    others = ("callbacks", "env", "help", "hydra_help", "hydra_logging", "job_logging", "output_subdir", "searchpath")
    block |= {name: {} for name in (*others, "verbose")}
    other: Schema = {"description": "docs/hydra.md says whether it acts"}
    described = {name: {**other, **schema} for name, schema in block.items()}
    return {"description": "acts: directories, launcher and sweeper of `stoker train -m`", **_closed(described)}


def _closed(properties: Schema) -> Schema:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _any_of(kinds: Mapping[str, type[ConfigBlock]]) -> Schema:
    """Return a block with the keys of several kinds, which `_target_` tells apart."""
    properties: Schema = {"_target_": {"enum": [*kinds]}}
    for kind in kinds.values():
        for name, schema in kind.model_json_schema()["properties"].items() if kind.model_fields else ():
            if name == "sampler":  # the caller's
                continue
            if "anyOf" in schema:  # a bounded `int | float` is nested, and one type in JSON
                alternatives = [{"type": "number"} if "anyOf" in one else one for one in schema["anyOf"]]
                schema = {**schema, "anyOf": alternatives}
            properties.setdefault(name, _acting(schema))
    return _closed(properties)


def _places(pattern: str, family: Family) -> Iterator[str]:
    """Yield the paths of a key that does not act; in a T5 one of the model is known in its stacks too."""
    if family == "bert" and pattern.startswith("model.bert."):
        return
    yield pattern
    in_stack = pattern.removeprefix("model.")
    if family == "t5" and in_stack != pattern and "." not in in_stack:
        for stack in STACKS["t5"]:
            yield f"{stack}.{in_stack}"


def _insert(block: Schema, names: list[str], row: KeyRow) -> None:
    """Insert a key that does not act below `block`; keys that act stay as they are."""
    name, *rest = names
    if name == "*":
        if block.get("type") == _INACTIVE_BLOCK:
            described = _inactive(row)
            block |= {"description": described.pop("description"), "additionalProperties": described}
    elif rest:
        empty = {**_inactive(row), "type": _INACTIVE_BLOCK, "properties": {}, "additionalProperties": False}
        inner = block["properties"].setdefault(name, {word: empty[word] for word in empty if word != "anyOf"})
        if all(value in ({}, None) for value in inner.get("anyOf", [{}])[0].get("enum", [0])):  # refused unless empty
            del inner["anyOf"]
            inner |= {word: empty[word] for word in ("type", "properties", "additionalProperties")}
        if "properties" in inner:
            _insert(inner, rest, row)
    else:
        block["properties"].setdefault(name, _inactive(row))


def _inactive(row: KeyRow) -> Schema:
    """Return the schema of a key that does not act."""
    described: Schema = {"description": f"{row.state.value}: {row.note}"}
    if row.state is KeyState.HISTORICAL or row.switch or row.same_as:
        return described
    accepted = [*row.accepts, None]
    distinct = [value for index, value in enumerate(accepted) if not _is_among(value, accepted[:index])]
    return {**described, "anyOf": [{"enum": distinct}, _INTERPOLATION]}


def _is_among(value: Any, others: list[Any]) -> bool:
    """Return True if a value equals another one in JSON, where 1 is 1.0 but not true."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in others)


def _expand(block: Schema, blocks: Mapping[str, Schema]) -> Schema:
    """Return pydantic's schema of a block with all blocks in it in place, and interpolations as values."""
    properties: Schema = {}
    for name, schema in block["properties"].items():
        reference = schema.get("$ref")
        properties[name] = _expand(blocks[reference.rpartition("/")[2]], blocks) if reference else _acting(schema)
        if reference:
            about = one_line(schema.get("description", ""))
            properties[name]["description"] = f"{KeyState.ACTS.value}: {about}"
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _acting(schema: Schema) -> Schema:
    state = _OWN if schema.get("own") else f"{KeyState.ACTS.value}: "
    about: Schema = {"description": state + one_line(schema.get("description", ""))}
    about |= {word: schema[word] for word in ("default", "examples") if word in schema}
    return about | _or_interpolation(schema)


_ABOUT = ("description", "default", "examples", "title", "own")


def _or_interpolation(schema: Schema) -> Schema:
    """Return a schema that also accepts an interpolation in place of the value, and of each item of it.

    Alternatives of different types become one list of types, which editors report best, where possible.
    """
    alternatives = [
        {word: alternative[word] for word in alternative if word not in _ABOUT}
        for alternative in schema.get("anyOf", [schema])
    ]
    for alternative in alternatives:
        for word in ("items", "additionalProperties"):
            if isinstance(alternative.get(word), dict):
                alternative[word] = _or_interpolation(alternative[word])
        if "pattern" in alternative:
            alternative["pattern"] = f"{alternative['pattern']}|{_REFERENCE}"
    if all(
        "enum" in alternative or "const" in alternative or alternative == {"type": "null"}
        for alternative in alternatives
    ):
        values = [
            value for alternative in alternatives for value in alternative.get("enum", [alternative.get("const")])
        ]
        return {"anyOf": [{"enum": values}, _INTERPOLATION]}
    types = [alternative["type"] for alternative in alternatives]
    takes_text = any(
        alternative["type"] == "string" and not {"enum", "const"} & alternative.keys() for alternative in alternatives
    )
    numbers = types.count("integer") + types.count("number")
    if numbers <= 1 and not any("enum" in alternative or "const" in alternative for alternative in alternatives):
        merged = {word: value for alternative in alternatives for word, value in alternative.items()}
        if "string" not in types:
            types.append("string")
            merged |= {"pattern": _REFERENCE, "patternErrorMessage": _NO_TEXT}
        return {**merged, "type": types[0] if len(types) == 1 else types}
    return {"anyOf": [*alternatives, *([] if takes_text else [_INTERPOLATION])]}
