"""Numbers of parameters in the comments of presets and in the pages are those of the models, as far as rounded."""

import re
from pathlib import Path

import pytest
from config_helpers import load
from resolved import batch_spec
from tiers import cases

from stoker.models.model_cost import count_parameters
from stoker.trainer.cli.list_names import main_comment
from stoker.trainer.config.schema.root import ModelBlock

ROOT = Path(__file__).resolve().parents[2]
COUNT = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?) ([MB])(?= parameters|[.,; ]|$)")
MODELS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def stated(text: str) -> list[tuple[float, float]]:
    """Return each number of parameters in a text, and the largest error of its rounding."""
    found = []
    for number, unit in COUNT.findall(text):
        scale = {"M": 1e6, "B": 1e9}[unit]
        found.append((float(number.replace(",", "")) * scale, 0.5 * scale * 10.0 ** -len(number.partition(".")[2])))
    return found


def counted(choice: str) -> tuple[int, int]:
    """Return all parameters of a preset, and those active per token, as far as known without data: of bytes."""
    root = load(choice).root
    vocab_size = root.model.override_vocab_size or (259 if root.model.family == "gpt" else 384)
    total, active = (count_parameters(root.model, vocab_size, batch_spec(root), active=flag) for flag in (False, True))
    return total, active


def check(where: str, numbers: list[tuple[float, float]], counts: tuple[int, ...]) -> None:
    for (number, error), count in zip(numbers, counts, strict=False):
        assert abs(number - count) <= error * 1.001, f"{where} says {number:,.0f}, the model has {count:,}"


@pytest.mark.parametrize("name", cases(MODELS, fast=4))
def test_comments_of_presets(name: str) -> None:
    comment = main_comment(ROOT / "conf" / "model" / f"{name}.yaml")
    total, active = counted(f"model={name}")
    if "without embeddings" in comment:
        root = load(f"model={name}").root
        assert isinstance(root.model, ModelBlock)
        assert root.model.position_embedding_type == "learned_absolute"
        multiple = root.model.make_vocab_size_divisible_by
        rows = -(-259 // multiple) * multiple + (root.model.max_position_embeddings or root.model.encoder_seq_length)
        total -= rows * root.model.hidden_size
    check(name, stated(comment), (total, active))


def test_tables_of_the_pages() -> None:
    seen = set()
    for page in PAGES:
        for line in page.read_text().splitlines():
            first, _, rest = line.removeprefix("| ").partition(" | ")
            choices = re.findall(r"`(?:(model|experiment)=)?([a-z0-9_]+)`", first)
            names = [f"{group or 'model'}={name}" for group, name in choices if group or name in MODELS]
            numbers = stated(rest)
            if not line.startswith("| ") or not names or not numbers:
                continue
            counts = [counted(name) for name in names]
            check(f"{page.name}: {line}", numbers, counts[0] if len(names) == 1 else tuple(pair[0] for pair in counts))
            seen |= set(names)
    assert {"model=t5_base", "model=bert_tiny", "model=gpt_moe_8x", "experiment=moe_pystd"} <= seen
