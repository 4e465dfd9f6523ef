"""The public API: what it exports, its signatures, its documentation, and what importing it costs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker import kernels

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = ROOT / "tests" / "data" / "public_api.txt"


def signatures():
    """Lines of every public name with its signature, and those of the methods and fields that classes add."""
    for name in sorted({*stoker.__all__} - {"__version__", "kernels"}):
        yield from signature(f"stoker.{name}", getattr(stoker, name))
    for name in sorted(kernels.__all__):
        yield from signature(f"stoker.kernels.{name}", getattr(kernels, name))


def signature(name, value):
    text = str(inspect.signature(value)).replace("collections.abc.", "").replace("typing.", "")
    yield f"{name}{text}"
    if inspect.isclass(value):
        for member, found in sorted(vars(value).items()):
            if not member.startswith("_") and (inspect.isfunction(found) or isinstance(found, property)):
                function: Any = found.fget if isinstance(found, property) else found
                yield f"{name}.{member}{inspect.signature(function)}"


def test_public_signatures_are_those_of_the_snapshot():
    """On purpose? Then write the file anew, `python tests/trainer/test_api.py`, and say so in CHANGELOG.md."""
    assert list(signatures()) == SNAPSHOT.read_text().splitlines()


def test_every_public_name_is_documented_with_an_example():
    for page, names in (("library.md", stoker.__all__), ("kernels.md", kernels.__all__)):
        blocks = "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S))
        prefix = "kernels" if page == "kernels.md" else "stoker"
        missing = [
            name for name in {*names} - {"__version__", "kernels"} if not re.search(rf"{prefix}\.{name}\b", blocks)
        ]
        assert not missing, f"docs/{page}"
    for module, names in ((stoker, {*stoker.__all__} - {"__version__", "kernels"}), (kernels, kernels.__all__)):
        assert all(inspect.getdoc(getattr(module, name)) for name in names)


def test_the_lines_of_docs_kernels_run():
    text = (ROOT / "docs" / "kernels.md").read_text()
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(block, names)
    reference = torch.nn.functional.cross_entropy((names["hidden"] @ names["head"].T)[:, :50], names["labels"])
    torch.testing.assert_close(names["loss"], reference)
    torch.testing.assert_close(names["rows"][3:8], names["hidden"][3:8] @ names["up"][2].T)


def test_importing_stoker_loads_nothing_else():
    code = (
        "import sys, stoker; stoker.load_config(['model=gpt_tiny']); stoker.kernels;"
        "print([m for m in ('torch', 'pytorch_lightning', 'triton', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_names_are_attribute_errors():
    for module in (stoker, kernels):
        with pytest.raises(AttributeError, match="no attribute 'lode'"):
            module.lode  # noqa: B018
        assert set(module.__all__) <= set(dir(module))


def test_wrong_arguments_are_told_before_anything_is_loaded(tmp_path):
    config = stoker.load_config(["model=gpt_tiny"])
    for call in (stoker.train, stoker.finetune, stoker.plan, stoker.explain_attention, stoker.GPTModule):
        with pytest.raises(TypeError, match=r"must come from stoker\.load_config"):
            call(["model=gpt_tiny"])  # pyrefly: ignore[bad-argument-type]
    wrong: list[dict[str, Any]] = [
        *({"max_new_tokens": 2.5}, {"num_beams": 0}, {"seed": "x"}, {"stop": "the"}, {"temperature": -1.0}),
        *({"temperature": 0, "top_k": 5}, {"num_beams": 2, "temperature": 0.5}, {"temperature": "hot"}),
    ]
    for arguments in wrong:
        with pytest.raises(stoker.UserError, match=next(iter(arguments)).partition("_")[0] + "|beam|temperature"):
            stoker.generate("nowhere", ["a"], **arguments)
    with pytest.raises(stoker.UserError, match="must be texts"):
        stoker.generate("nowhere", [[{"role": "user", "content": "x"}]])
    with pytest.raises(TypeError, match=r"must come from stoker\.load"):
        stoker.generate(config, ["a"])  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(stoker.UserError, match=r"`split` \(dev\) must be validation or test"):
        stoker.evaluate("nowhere", split="dev")  # pyrefly: ignore[bad-argument-type]
    options: list[dict[str, Any]] = [{"to": "gguf"}, {"dtype": "int8"}]
    for option in options:
        with pytest.raises(stoker.UserError, match=rf"`{next(iter(option))}` \(\w+\) must be one of"):
            stoker.convert(tmp_path, tmp_path / "out", **option)
    with pytest.raises(stoker.UserError, match="need processes"):
        stoker.train(stoker.load_config(["model=gpt_tiny", "trainer.devices=2", "model.micro_batch_size=8"]))


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(signatures()) + "\n")
