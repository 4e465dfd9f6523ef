"""Every model preset: of the size its name says, built on the meta device; shrunk, it trains."""

from pathlib import Path

import pytest
import torch
from config_helpers import load
from resolved import batch_spec
from tiers import cases

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_model, num_parameters
from stoker.trainer.train import run_training

MODELS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
SIZES = {"gpt_tiny": 0.9e6, "gpt_125m": 87e6, "gpt2_124m": 124e6, "llama_1b": 1.2e9, "gpt3_1b": 1.3e9}
SIZES |= {"gpt_moe_8x": 1.525e9, "mixtral_tiny": 2.66e6, "t5_moe_base": 644e6}
"""Parameters; `gpt_125m` has bytes for a vocabulary, which leaves little of the embeddings of its name."""
EXACT = {
    "t5_tiny": 1_280_384,
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_v1_1_base": 247_577_856,
    "byt5_small": 299_637_760,
    "bert_tiny": 479_744,
    "bert_base": 109_514_298,
}
"""Those of Hugging Face's models of the name; the tiny ones are our own."""
SHRUNK = [
    *("model.num_layers=2", "model.hidden_size=96", "model.ffn_hidden_size=96"),
    *("model.override_vocab_size=400", "model.micro_batch_size=1", "model.global_batch_size=2", "data=mock"),
    *("trainer=cpu", "trainer.max_steps=1", "trainer.limit_val_batches=0"),
    *("exp_manager.create_tensorboard_logger=False", "exp_manager.create_checkpoint_callback=False"),
]


@pytest.mark.parametrize("name", cases(MODELS, fast=5))
def test_size(name: str) -> None:
    root = load(f"model={name}").root
    vocab_size = root.model.override_vocab_size or (259 if root.model.family == "gpt" else 384)
    model = build_model(
        root.model,
        vocab_size=vocab_size,
        device="meta",
        dtype=torch.bfloat16,
        flags=AttentionFlags(),
        micro_batch_size=1,
        batch_spec=batch_spec(root),
    )
    assert num_parameters(model) == EXACT.get(name, pytest.approx(SIZES.get(name, 0), rel=0.1))


@pytest.mark.parametrize("name", cases(MODELS, fast=2))
def test_shrunk_it_trains(name: str, tmp_path: Path) -> None:
    length = "seq_length" if "t5" in name else "encoder_seq_length"
    where = f"exp_manager.explicit_log_dir={tmp_path}"
    result = run_training(load(f"model={name}", where, f"model.{length}=16", *SHRUNK))
    assert result.step == 1
