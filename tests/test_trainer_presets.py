"""Every model preset: of the size its name says, built on the meta device; shrunk, it trains."""

from pathlib import Path

import pytest
import torch
from config_helpers import load

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_gpt, parameter_count
from stoker.trainer.run import run_training

MODELS = sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "model").glob("*.yaml"))
SIZES = {"gpt_tiny": 0.9e6, "gpt_125m": 87e6, "gpt2_124m": 124e6, "llama_1b": 1.2e9, "gpt3_1b": 1.3e9}
"""Parameters; `gpt_125m` has bytes for a vocabulary, which leaves little of the embeddings of its name."""
SHRUNK = [
    *("model.num_layers=2", "model.hidden_size=96", "model.ffn_hidden_size=96", "model.encoder_seq_length=16"),
    *("model.override_vocab_size=300", "model.micro_batch_size=1", "model.global_batch_size=2", "data=mock"),
    *("trainer=cpu", "trainer.max_steps=1", "trainer.limit_val_batches=0"),
    *("exp_manager.create_tensorboard_logger=False", "exp_manager.create_checkpoint_callback=False"),
]


@pytest.mark.parametrize("name", MODELS)
def test_size(name: str) -> None:
    keys = load(f"model={name}").root.model
    vocab_size = keys.override_vocab_size or 259
    model = build_gpt(
        keys,
        vocab_size=vocab_size,
        device="meta",
        dtype=torch.bfloat16,
        flags=AttentionFlags(),
        micro_batch_size=1,
    )
    assert parameter_count(model) == pytest.approx(SIZES[name], rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_shrunk_it_trains(name: str, tmp_path: Path) -> None:
    result = run_training(load(f"model={name}", f"exp_manager.explicit_log_dir={tmp_path}", *SHRUNK))
    assert result.step == 1
