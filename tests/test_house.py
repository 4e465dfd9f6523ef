"""The house rules that no linter knows."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tiers import full_only

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"kernels": 1, "models": 2, "trainer": 3}
FILES = [p for room in (*FLOORS, "conf") for p in sorted((ROOT / room).rglob("*.py"))]
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "torch.save", "yaml.load", "yaml.full_load", "np.load"}
# attention flags, everything else, and whether Triton interprets, which Triton itself reads at import
READS_ENVIRONMENT = {"kernels/attention/flags.py", "trainer/utils/environment.py", "kernels/launch.py"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def source(path: Path) -> str:
    return path.read_text()


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source(path))))


def test_every_package_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"stoker"} | {"stoker." + ".".join(p.parent.relative_to(ROOT).parts) for p in FILES}
    assert declared == found


def test_every_data_file_is_package_data() -> None:
    """A wheel holds the YAML and JSON files that the rooms read."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {package: ROOT.joinpath(*package.split(".")[1:]) for package in declared}
    packaged = {path for package, globs in declared.items() for glob in globs for path in folders[package].glob(glob)}
    data = {".yaml", ".json"}
    files = [path for room in (*FLOORS, "conf") for path in (ROOT / room).rglob("*") if path.suffix in data]
    assert len(files) > 60
    assert [name(path) for path in files if path not in packaged] == []


def imports_upwards(path: Path) -> Iterator[str]:
    parts = path.relative_to(ROOT).parts
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = (node.module or "").split(".")[0]
            if node.level >= len(parts) and target and not FLOORS[target] < FLOORS[parts[0]]:
                yield f"{name(path)}:{node.lineno} imports {target} from {parts[0]}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if {"stoker", *FLOORS, "conf"} & {module.split(".")[0] for module in modules}:
                yield f"{name(path)}:{node.lineno} imports a room by an absolute name"


@full_only  # as `lint-imports`, which every commit passes
def test_imports_go_down() -> None:
    assert [line for path in FILES for line in imports_upwards(path)] == []


def test_environment_is_read_in_three_files() -> None:
    touches = {"environ", "getenv", "putenv"}
    assert [
        f"{name(path)}:{node.lineno} touches the environment"
        for path in FILES
        if name(path) not in READS_ENVIRONMENT and any(word in source(path) for word in touches)
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in touches
    ] == []


def test_lightning_is_imported_in_one_file() -> None:
    """Which hides the optional packages of torchmetrics: an earlier import elsewhere would import them all."""
    at_import = re.compile(r"^(?:from|import) (?:pytorch_lightning|lightning|torchmetrics)\b", re.MULTILINE)
    assert [name(path) for path in FILES if at_import.search(source(path))] == []


def unsafe_uses(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            modules |= {(getattr(node, "module", None) or "").split(".")[0]}
            if modules & UNSAFE_MODULES:
                yield f"{name(path)}:{node.lineno} imports {modules & UNSAFE_MODULES}"
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in {"eval", "exec", "__import__"}:
                yield f"{name(path)}:{node.lineno} calls {called.id}"
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                dotted = f"{called.value.id}.{called.attr}"
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if dotted == "torch.load" and name(path) == "trainer/conversion/torch_files.py":
                    if given.get("weights_only") != "True":
                        yield f"{name(path)}:{node.lineno} calls torch.load without weights_only=True"
                elif dotted in UNSAFE_CALLS or called.attr in {"instantiate", "get_class", "get_method"}:
                    yield f"{name(path)}:{node.lineno} calls {dotted}"


def test_nothing_unsafe_is_called() -> None:
    """No pickle, no code from data: weights are safetensors, everything else JSON.

    Files of torch's own are read in one place, by `weights_only`.
    """
    assert [line for path in FILES for line in unsafe_uses(path)] == []


def parameters(function: ast.FunctionDef) -> set[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {argument.arg for argument in every if argument}


def fields(owner: ast.ClassDef) -> set[str]:
    """Return the fields and methods of a class, the attributes it sets and the parameters of its constructor."""
    methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
    found = {method.name for method in methods}
    found.update(*(parameters(method) for method in methods if method.name == "__init__"))
    found |= {
        node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    for assignment in owner.body:
        if isinstance(assignment, ast.Assign | ast.AnnAssign):
            targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def unknown_arguments(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            doc = ast.get_docstring(node) or ""
            sections = re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n)*)", doc, re.MULTILINE)
            entries = [entry for section in sections for entry in re.findall(r"(?m)^    ([\w*][^:]*):", section)]
            documented = {word.strip(" *") for entry in entries for word in entry.split(",")}
            if unknown := documented - (fields(node) if isinstance(node, ast.ClassDef) else parameters(node)):
                yield f"{name(path)}:{node.lineno} {node.name} has no {sorted(unknown)}"


def test_docstrings_name_parameters_that_exist() -> None:
    assert [line for path in FILES for line in unknown_arguments(path)] == []


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"\b(?:kernels|models|trainer|conf|tests|scripts|docs)/[\w/]*(?:\.\w+)?", page))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_importing_a_room_does_nothing() -> None:
    """Rooms and the configuration import without torch, Lightning or Hydra."""
    code = (
        "import sys; import stoker, stoker.kernels, stoker.models, stoker.trainer, stoker.models.config.gpt, "
        "stoker.trainer.config.schema.root; "
        "sys.exit(', '.join({'torch', 'pytorch_lightning', 'hydra', 'triton'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
