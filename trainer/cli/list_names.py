"""`stoker list TOPIC [WORD]`: presets, configuration keys and attention backends, a line each; without torch."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.errors import EXIT_OK, UserError
from ..utils.text import one_line

if TYPE_CHECKING:
    from ...kernels.attention.backend_support import Backend

GROUPS = {
    "models": "model",
    "data": "data",
    "experiments": "experiment",
    "optim": "optim",
    "tokenizers": "tokenizer",
    "trainers": "trainer",
    "peft": "peft",
}
"""Topics that are config groups."""
TOPICS = (*GROUPS, "keys", "backends")
_SENTENCE_END = re.compile(r"(?<=[^.\s])\.(?=\s+([A-Z`]|stoker )|$)")  # `stoker ...` is an example on its own line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker list`."""
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help=", ".join(TOPICS))
    parser.add_argument("word", metavar="WORD", nargs="?", default="", help="only lines that contain it")
    parser.add_argument("--config-dir", type=Path, metavar="D", help="folder with your own configuration files")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")


def run(args: argparse.Namespace) -> int:
    """List one topic.

    Raises:
        UserError: there is no such topic, or nothing in it contains the word.
    """
    if args.topic is None:
        print("\n".join(f"stoker list {topic}" for topic in TOPICS))
        return EXIT_OK
    if args.topic not in TOPICS:
        from ..config.suggest import closest

        near = closest(args.topic, TOPICS)
        hint = f"did you mean `stoker list {near}`?" if near else f"topics are {', '.join(TOPICS)}"
        raise UserError(f"stoker list {args.topic}: there is no such topic; {hint}")
    sources: dict[str, Callable[[], list[dict[str, str]]]] = {"keys": _keys, "backends": _backends}
    rows = sources[args.topic]() if args.topic in sources else _presets(GROUPS[args.topic], args.config_dir)
    shown = [row for row in rows if args.word.lower() in " ".join(row.values()).lower()]
    if rows and not shown:
        raise UserError(
            f"stoker list {args.topic} {args.word}: none of {len(rows)} contains that; leave it out for all"
        )
    if args.json:
        print(json.dumps(shown, indent=2))
        return EXIT_OK
    columns = [name for name in (shown[0] if shown else {}) if name not in ("purpose", "file")]
    widths = {name: min(40, max(len(row[name]) for row in shown)) for name in columns}
    for row in shown:
        print("  ".join([*(f"{row[name]:<{widths[name]}}" for name in columns), row["purpose"]]))
    return EXIT_OK


def first_sentence(text: str) -> str:
    """Return the first sentence of a text on one line, without its full stop."""
    line = one_line(text)
    end = _SENTENCE_END.search(line)
    return line[: end.start()] if end else line


def _presets(group: str, config_dir: Path | None) -> list[dict[str, str]]:
    """Return the options of a config group; those of the user's folders hide packaged ones of the same name."""
    from ..config.compose import Composer

    composer = Composer(config_dir)
    rows: list[dict[str, str]] = []
    for name in composer.options(group):
        path = next(folder / group / f"{name}.yaml" for folder in composer.directories if _has(folder, group, name))
        rows.append({"name": name, "purpose": first_sentence(main_comment(path)), "file": str(path)})
    return rows


def _has(folder: Path, group: str, name: str) -> bool:
    return (folder / group / f"{name}.yaml").is_file()


def main_comment(path: Path) -> str:
    """Return the comment a YAML file begins with, without the lines for Hydra (`@package`) and for editors."""
    found: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if not re.match(r"#\s*(@package|yaml-language-server:)", line):
            found.append(line.removeprefix("#").strip())
    return " ".join(found)


def _keys() -> list[dict[str, str]]:
    """Return the keys of every family, those of a GPT first."""
    from ...models.config.model import FAMILIES
    from ..config.schema.key_index import format_value, schema_keys

    keys = {path: key for family in reversed(FAMILIES) for path, key in schema_keys(family).items()}
    ordered = {path: keys[path] for family in FAMILIES for path in schema_keys(family)}
    return [
        {"name": path, "default": format_value(key.default), "purpose": first_sentence(key.description)}
        for path, key in ordered.items()
    ]


def _backends() -> list[dict[str, str]]:
    """Return the attention backends, with what they need: why they do not support calls that lack it."""
    from ...kernels.attention.backend_support import BACKENDS

    return [
        {"name": backend.name, "family": backend.family, "purpose": f"{_purpose(backend)}{_needs(backend)}"}
        for backend in BACKENDS
    ]


def _purpose(backend: Backend) -> str:
    text = first_sentence((backend.why_not.__doc__ or "").partition("\n")[0])
    return re.sub(r"^(Check|Return None:) ", "", text)


def _needs(backend: Backend) -> str:
    from ...kernels.attention.call_spec import AttentionCall, InstalledSoftware

    usual = AttentionCall(
        device="cuda",
        capability=(9, 0),
        dtype="bf16",
        batch=1,
        heads=8,
        groups=8,
        head_dim=64,
        queries=1024,
        keys=1024,
        training=True,
    )
    bare = InstalledSoftware(torch=(2, 11))
    full = InstalledSoftware(torch=(2, 11), cudnn=91900, triton=(3, 6), te=(2, 20), flash_attn=(2, 8, 3))
    probes = (
        (replace(usual, device="cpu", capability=None, dtype="fp32"), full),
        (replace(usual, capability=(7, 5)), full),
        (replace(usual, dtype="fp32"), full),
        (usual, bare),
    )
    reasons = [reason for probe in probes if (reason := backend.why_not(*probe)) is not None]
    found = (re.sub(r", (not|found) \S+$", "", reason) for reason in reasons)
    needs = dict.fromkeys(re.sub(r"^(\S+) is not installed", r"needs \1", text) for text in found)
    return f"; {'; '.join(needs)}" if needs else "; runs everywhere"
