"""The house rules that no linter knows."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"kernels": 1, "models": 2, "trainer": 3}
FILES = [p for room in (*FLOORS, "conf") for p in sorted((ROOT / room).rglob("*.py"))]
UNSAFE = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_package_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"stoker"} | {"stoker." + ".".join(p.parent.relative_to(ROOT).parts) for p in FILES}
    assert declared == found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            heads = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            heads = [(node.module or "").split(".")[0]]
        elif isinstance(node, ast.ImportFrom):
            climbed = node.level - len(parts) + 1
            heads = []
            if climbed > 0 and node.module:
                target = node.module.split(".")[0]
                assert FLOORS[target] < FLOORS[parts[0]], f"{path}:{node.lineno} imports {target} from {parts[0]}"
        else:
            continue
        assert not {"stoker", *FLOORS, "conf"} & set(heads), f"{path}:{node.lineno} imports a room by an absolute name"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_environment_is_read_in_two_files(path: Path) -> None:
    """Attention flags in kernels/attention/flags.py, the rest in trainer/utils/environment.py; kernels/launch.py asks
    whether Triton interprets, which Triton itself reads at import."""
    allowed = {"kernels/attention/flags.py", "kernels/launch.py", "trainer/utils/environment.py"}
    if name(path) in allowed:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"environ", "getenv", "putenv"}, f"{path}:{node.lineno} touches the environment"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_unsafe_is_called(path: Path) -> None:
    """No pickle, no code from data: weights are safetensors, everything else JSON.

    Files of torch's own are read in one place, by `weights_only`.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            modules |= {(getattr(node, "module", None) or "").split(".")[0]}
            assert not modules & UNSAFE, f"{path}:{node.lineno} imports {modules & UNSAFE}"
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                assert called.id not in {"eval", "exec", "__import__"}, f"{path}:{node.lineno} calls {called.id}"
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                dotted = f"{called.value.id}.{called.attr}"
                if dotted == "torch.load" and name(path) == "trainer/conversion/torch_files.py":
                    given = {keyword.arg: keyword.value for keyword in node.keywords}
                    assert ast.unparse(given["weights_only"]) == "True"
                    continue
                assert dotted not in {"torch.load", "torch.save", "yaml.load", "yaml.full_load", "np.load"}, (
                    f"{path}:{node.lineno} calls {dotted}"
                )
                assert called.attr not in {"instantiate", "get_class", "get_method"}, f"{path}:{node.lineno} {dotted}"


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"\b(?:kernels|models|trainer|conf|tests|scripts|docs)/[\w/]*(?:\.\w+)?", page))
    named.discard("tests/test_")  # the pattern of the names of tests
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
