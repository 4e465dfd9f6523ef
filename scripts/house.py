"""Figures of the code base: size, import cycles, fan-in and fan-out.

    python scripts/house.py                  the figures
    python scripts/house.py --since COMMIT   and the lines added and removed since then
    python scripts/house.py --check          exit 1 if any import cycle exists (CI)
    python scripts/house.py --root DIR       of another checkout

Three import graphs are looked at: what is imported when a module is loaded, the same with imports under
TYPE_CHECKING, and with imports inside functions too. A cycle is a strongly connected component of more than one module.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import networkx

ROOMS = ("kernels", "models", "trainer")
Kind = Literal["load", "type", "lazy"]
CYCLES: Mapping[str, frozenset[Kind]] = {
    "at load": frozenset({"load"}),
    "with TYPE_CHECKING": frozenset({"load", "type"}),
    "with imports in functions": frozenset({"load", "type", "lazy"}),
}


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name below the root, path, syntax tree and number of lines."""

    name: str
    path: Path
    tree: ast.Module
    lines: int


def read_modules(root: Path) -> dict[str, Module]:
    """Modules of the rooms by dotted name; a package has the name of its folder."""
    found = {}
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text()
        found[name] = Module(name, path.relative_to(root), ast.parse(source), source.count("\n"))
    return found


def imports_of(module: Module, names: Mapping[str, Module]) -> Iterator[tuple[str, Kind]]:
    """The project's modules that a module imports relatively, and in which of the three ways."""
    package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]

    def visit(node: ast.AST, kind: Kind) -> Iterator[tuple[str, Kind]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            kind = "lazy"
        elif isinstance(node, ast.If) and kind == "load" and "TYPE_CHECKING" in ast.unparse(node.test):
            kind = "type"
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            target = ".".join(part for part in base if part)
            for alias in node.names:
                full = f"{target}.{alias.name}"
                yield (full if full in names else target), kind
        for child in ast.iter_child_nodes(node):
            yield from visit(child, kind)

    yield from visit(module.tree, "load")


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module, largest first."""
    found = networkx.strongly_connected_components(networkx.DiGraph(dict(graph)))
    return sorted((sorted(one) for one in found if len(one) > 1), key=lambda one: (-len(one), one))


def functions(module: Module) -> Iterator[tuple[int, str]]:
    """Length in lines and name of every function of a module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{module.path}:{node.name}"


def count_lines(root: Path, folder: str) -> tuple[int, int]:
    """Python files below a folder, and their lines."""
    files = list((root / folder).rglob("*.py"))
    return len(files), sum(path.read_text().count("\n") for path in files)


def net_lines(root: Path, since: str) -> Iterator[str]:
    """Lines added and removed since a commit: code (with the data files beside it), tests and scripts."""
    for title, folders in (("code", ROOMS), ("tests", ("tests",)), ("scripts", ("scripts",))):
        patterns = [f"{folder}/*.{ending}" for folder in folders for ending in ("py", "yaml")]
        command = ["git", "-C", str(root), "diff", "--numstat", "-M", since, "--", *patterns]
        rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        counts = [tuple(map(int, row.split()[:2])) for row in rows]
        added, removed = sum(one for one, _ in counts), sum(other for _, other in counts)
        yield f"  {title:8} +{added:,} -{removed:,} = {added - removed:+,}"


def main() -> int:
    """Print the figures; with `--check` exit 1 where a cycle exists."""
    parser = argparse.ArgumentParser(description="Figures of the code base.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--since", metavar="COMMIT", help="count lines added and removed since this commit")
    parser.add_argument("--check", action="store_true", help="exit 1 if any import cycle exists")
    args = parser.parse_args()
    modules = read_modules(args.root)
    graphs: dict[str, dict[str, set[str]]] = {title: defaultdict(set) for title in CYCLES}
    for module in modules.values():
        for target, kind in imports_of(module, modules):
            for title, kinds in CYCLES.items():
                if kind in kinds and target in modules and target != module.name:
                    graphs[title][module.name].add(target)

    for folder in (*ROOMS, "tests", "scripts"):
        files, lines = count_lines(args.root, folder)
        print(f"{folder:9}{files:5} files {lines:8,} lines")
    whole = graphs["with imports in functions"]
    failed = False
    for title, graph in graphs.items():
        found = cycles(graph)
        failed |= bool(found)
        print(f"cycles {title}: {len(found)}" + "".join(f"\n  {len(one)}: {', '.join(one)}" for one in found))
    print(f"files flat in trainer/: {sum(len(m.path.parts) == 2 for m in modules.values() if m.name[0] == 't')}")
    names = Counter(module.path.name for module in modules.values() if module.path.name != "__init__.py")
    repeated = {name: count for name, count in sorted(names.items()) if count > 1}
    print(f"repeated basenames: {len(repeated)}: {', '.join(f'{n} x{c}' for n, c in repeated.items())}")
    longest = max(modules.values(), key=lambda module: module.lines)
    length, function = max(pair for module in modules.values() for pair in functions(module))
    print(f"longest file: {longest.path} ({longest.lines}); longest function: {function} ({length})")
    fan_in = Counter(target for targets in whole.values() for target in targets)
    for title, top in (("fan-in", fan_in), ("fan-out", Counter({name: len(to) for name, to in whole.items()}))):
        print(f"top {title}: {', '.join(f'{name} {count}' for name, count in top.most_common(5))}")
    if args.since:
        print(f"since {args.since}:", *net_lines(args.root, args.since), sep="\n")
    return 1 if args.check and failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
