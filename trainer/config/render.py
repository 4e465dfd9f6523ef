"""Output of `stoker config`: effective configuration with origins as YAML or JSON, list of keys, docs page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...models.config.key_block import Finding
from ...models.config.model import FAMILIES, Family
from . import dotted_paths
from .nemo.key_states import key_state
from .nemo.key_table import KeyState, key_table, unsupported_values
from .problems import MAX_LISTED, ConfigError, KeyReport, with_origin
from .run_config import RunConfig
from .schema.key_index import SchemaKey, find_key, format_value, schema_blocks, schema_keys

_MAX_COMMENT_COLUMN = 48
_EDITORS = """\
## In an editor

Editors with [yaml-language-server](https://github.com/redhat-developer/yaml-language-server) (VS Code's YAML extension,
Neovim, Emacs, Helix and others) complete keys, show their meaning, state and default, and underline unknown keys and
values of a wrong type in every file that names its JSON schema, as all files of `stoker/conf` do:

```yaml
# @package model.data
# yaml-language-server: $schema=../schema/data.json
data_impl: text
path: ???
```

`stoker config --schema-files conf/schema` writes the schemas into a folder beside your own files: `data.json` is for
the group `data`, `primary.json` for train.yaml, finetune.yaml and whatever `--config-name` names. `--schema-path
data` prints the path of the installed one instead. `# @package` must stay the first line: Hydra reads no further than
the first other comment.
Rules between keys and NeMo's other spellings of values are not in a schema; `stoker config` has them.

Python's `jsonschema` finds the files that refer to each other by their place:

```python
def read(uri: str) -> Resource:
    return Resource.from_contents(json.loads(Path(urlparse(uri).path).read_text()))


schema = {"$ref": Path("conf/schema/primary.json").resolve().as_uri()}
Draft7Validator(schema, registry=Registry(retrieve=read)).validate(yaml.safe_load(text))
```"""


def as_yaml(key_reports: Sequence[KeyReport]) -> str:
    """Return the keys that act as valid YAML with origins as comments, followed by those that do not act."""
    acting = [row for row in key_reports if row.state is KeyState.ACTS]
    lines = [*_yaml_lines(acting), *_inactive_lines([row for row in key_reports if row.state is not KeyState.ACTS])]
    return "\n".join(lines)


def _yaml_lines(rows: Sequence[KeyReport]) -> Iterator[str]:
    written: list[tuple[str, str]] = []
    open_blocks: list[str] = []
    for row in rows:
        *blocks, name = row.path.split(".")
        shared = 0
        while shared < min(len(blocks), len(open_blocks)) and blocks[shared] == open_blocks[shared]:
            shared += 1
        for depth in range(shared, len(blocks)):
            written.append(("  " * depth + f"{blocks[depth]}:", ""))
        open_blocks = blocks
        marks = [row.origin]
        key = find_key(row.path)
        if key is not None and key.own:
            marks.append("own key")
        if row.note:
            marks.append(row.note)
        written.append(("  " * len(blocks) + f"{name}: {row.value}", "; ".join(marks)))
    width = min(_MAX_COMMENT_COLUMN, max((len(text) for text, mark in written if mark), default=0))
    for text, mark in written:
        yield f"{text:<{width}}  # {mark}" if mark else text


def _inactive_lines(rows: Sequence[KeyReport]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield "# Given keys that do not act:"
    shown = [(f"{row.path}: {row.value}", row.state.value if row.state else "unknown", row) for row in rows]
    width = min(_MAX_COMMENT_COLUMN + 12, max(len(text) for text, _, _ in shown))
    for text, state, row in shown:
        note = f"  {row.note}" if row.note else ""
        yield f"#   {text:<{width}}  {state:<10}  {row.origin}{note}"


def as_json(
    key_reports: Sequence[KeyReport], findings: Iterable[Finding], config: RunConfig | None, error: ConfigError | None
) -> str:
    """Return keys, findings and problems as one JSON object."""
    keys: dict[str, Any] = {}
    for row in key_reports:
        key = find_key(row.path)
        value: Any = row.value
        if config is not None and row.state is KeyState.ACTS:
            value = dotted_paths.get(config.document, row.path)
            if row.value != format_value(value):  # a reference to the environment, shown resolved
                value = dotted_paths.get(config.root.model_dump(mode="json"), row.path)
        keys[row.path] = {
            "value": value,
            "state": row.state.value if row.state else "unknown",
            "origin": row.origin,
            "own": key is not None and key.own,
            "note": row.note,
        }
    problems = [] if error is None else error.problems
    return json.dumps(
        {
            "valid": error is None,
            "digest": config.digest if config else None,
            "keys": keys,
            "findings": findings_document(findings),
            "problems": [asdict(problem) for problem in problems],
        },
        indent=2,
    )


def as_key_list(family: Family = "gpt") -> str:
    """Return a table of all keys known to a family, with state, default and meaning."""
    acting = schema_keys(family)
    rows = [(key.path, KeyState.ACTS.value, format_value(key.default), key.description) for key in acting.values()]
    rows += [
        (row.pattern, row.state.value, format_value(row.default), row.note)
        for row in key_table().values()
        if row.pattern not in acting
    ]
    width = max(len(path) for path, *_ in rows)
    return "\n".join(
        f"{path:<{width}}  {state:<10}  {default:<16}  {meaning}".rstrip() for path, state, default, meaning in rows
    )


def as_docs_page() -> str:
    """Return docs/configuration.md: every key with state, accepted values, default and meaning."""
    return "\n".join(_docs_lines()) + "\n"


def _docs_lines() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield "<!-- Written by `stoker config --docs`; change the schema or the key table instead. -->"
    yield ""
    yield (
        "All known keys. A key is in one of four states: it **acts**; it is **not yet** supported (an error, unless "
        "its value means off); it is **refused** for good; or it is **historical** (known from NeMo, accepted, without "
        "effect here). Any other key is an error. Keys marked *own* are stoker's; all others are NeMo's, with the same "
        "meaning."
    )
    yield ""
    yield from _EDITORS.splitlines()
    yield ""
    yield "## Keys that act"
    yield from _tables(schema_keys().values(), schema_blocks())
    names: dict[Family, str] = {"t5": "T5", "bert": "BERT"}
    for family, name in names.items():
        yield ""
        yield f"## Keys of {name}"
        yield ""
        yield (
            f"With `model.family: {family}` the keys above apply too, except those of `model` that only GPT has, and "
            "these, which are additional or have another default."
        )
        if family == "t5":
            yield (
                "`model.encoder` and `model.decoder` each have all keys of a stack; one set at `model` applies to "
                "both, with a warning. The table of `model.decoder` lists only keys that differ from `model.encoder`."
            )
        yield from _tables(_family_specific_keys(family), schema_blocks(family))
    for state in (KeyState.NOT_YET, KeyState.REFUSED, KeyState.HISTORICAL):
        yield ""
        yield f"## {state.value.capitalize()}"
        yield ""
        accepted = "" if state is KeyState.HISTORICAL else " accepted value |"
        yield f"| key |{accepted} {'reason' if state is not KeyState.NOT_YET else 'description'} |"
        yield "|---|---|" + ("---|" if accepted else "")
        for row in key_table().values():
            if row.state is not state:
                continue
            value = ", ".join(f"`{_cell(format_value(accepted))}`" for accepted in row.accepts) or "`null`"
            if row.switch:
                value = f"any while `{row.switch}` is off"
            elif row.same_as:
                value = f"that of `{row.same_as}`"
            yield f"| `{row.pattern}` |" + (f" {value} |" if accepted else "") + f" {_cell(row.note)} |"
        yield from _unsupported_value_rows(state)


def _unsupported_value_rows(state: KeyState) -> Iterator[str]:
    """Yield table rows for unsupported values of keys that act."""
    for path, reasons in unsupported_values().items():
        key = schema_keys()[path]
        accepted = ", ".join(f"`{_cell(format_value(choice))}`" for choice in key.choices) or _cell(key.kind)
        for reason in dict.fromkeys(reasons.values()):
            if reason.state is state:
                values = ", ".join(f"`{_cell(format_value(value))}`" for value in reasons if reasons[value] == reason)
                yield f"| `{path}` set to {values} | {accepted} | {_cell(reason.note)} |"


def _family_specific_keys(family: Family) -> Iterator[SchemaKey]:
    """Yield the keys of a family that differ from GPT's; keys that both stacks of a T5 share only once."""
    known = schema_keys()
    own = schema_keys(family)
    for path, key in own.items():
        twin = own.get(path.replace("model.decoder.", "model.encoder.")) if path.startswith("model.decoder.") else None
        if key != known.get(path) and (twin is None or replace(twin, path=path) != key):
            yield key


def _tables(keys: Iterable[SchemaKey], blocks: Mapping[str, str]) -> Iterator[str]:
    """Yield a Markdown table for each block."""
    parent = None
    for key in keys:
        above = dotted_paths.parent_of(key.path)
        if above != parent:
            parent = above
            yield ""
            yield f"### `{above}`" if above else "### Root"
            yield ""
            if above:
                yield blocks[above]
                yield ""
            yield "| key | takes | default | meaning |"
            yield "|---|---|---|---|"
        name = key.path.rpartition(".")[2] + ("` *own*" if key.own else "`")
        yield f"| `{name} | {_cell(key.kind)} | `{_cell(format_value(key.default))}` | {_cell(key.description)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield warnings and notes for the terminal, one line each: origin, key, message, fix."""
    all_findings = list(findings)
    for finding in all_findings[:MAX_LISTED]:
        fix = f" ({finding.fix})" if finding.fix else ""
        first = next(iter(finding.keys), "")
        acts = any(key_state(first, family) is KeyState.ACTS for family in FAMILIES)
        one_key = len(finding.keys) <= 3 and acts
        where = f"{with_origin(first, first, finding.origin)}: " if one_key else ""
        yield f"{'warning' if finding.level == 'warning' else 'note'}: {where}{finding.message}{fix}"
    if len(all_findings) > MAX_LISTED:
        yield f"and {len(all_findings) - MAX_LISTED:,} more"


def findings_document(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return warnings and notes for `--json`."""
    return [asdict(finding) for finding in findings]
