"""Fine-tuning runs of a few steps on tiny models saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from hf_folders import TOKENS, VOCAB, letter_tokenizer, random_model, save
from torch import Tensor

from stoker.models.t5 import T5
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.conversion.finetune_defaults import load_finetune_config
from stoker.trainer.conversion.load_model import LoadedModel
from stoker.trainer.train import TrainingResult, run_training

TEXT = "to be or not to be that is the question whether tis nobler in the mind to suffer " * 60


def base_folder(name: str, folder: Path) -> Path:
    """Write a random model of an architecture and a letter tokenizer to `folder`."""
    save(random_model(name), folder)
    letter_tokenizer(folder)
    return folder


def finetune_config(base: Path, directory: Path, *overrides: str, peft: str | None = "lora") -> RunConfig:
    """Configuration of `stoker finetune` on a text file, one step of four samples."""
    text = directory.parent / "text.txt"
    text.write_text(TEXT)
    is_t5 = "t5" in base.name
    common = [
        f"model.restore_from_path={base}",
        "data=text",
        f"model.data.path={text}",
        "trainer.accelerator=cpu",
        "trainer.max_steps=1",
        "trainer.limit_val_batches=0",
        "trainer.enable_model_summary=false",
        "exp_manager.create_tensorboard_logger=false",
        f"exp_manager.explicit_log_dir={directory}",
        "model.micro_batch_size=2",
        "model.global_batch_size=4",
        "model.optim.lr=1e-2",
        *(["model.seq_length=24", "model.tokenizer.num_sentinel_tokens=20"] if is_t5 else []),
        *([] if is_t5 else ["model.encoder_seq_length=16"]),
    ]
    choice = [f"peft={peft}"] if peft else []
    by_key = {override.partition("=")[0].lstrip("~"): override for override in (*common, *choice, *overrides)}
    return load_finetune_config(None, None, list(by_key.values()), {})


def finetune(base: Path, directory: Path, *overrides: str, peft: str | None = "lora") -> TrainingResult:
    """Train with `finetune_config`."""
    return run_training(finetune_config(base, directory, *overrides, peft=peft))


def some_tokens(samples: int = 2, length: int = TOKENS - 4) -> Tensor:
    """Return random token ids, (samples, length) int64."""
    return torch.randint(0, VOCAB, (samples, length), generator=torch.Generator().manual_seed(3))


def our_logits(restored: LoadedModel, tokens: Tensor) -> Tensor:
    """Return the logits of a restored model; for T5 with the shifted input as decoder input."""
    model: Any = restored.model
    with torch.no_grad():
        logits = model(tokens, _shifted(tokens)) if isinstance(model, T5) else model(tokens)
    return logits[..., :VOCAB]


def their_logits(model: transformers.PreTrainedModel | Any, tokens: Tensor, *, is_t5: bool = False) -> Tensor:
    """Return the same logits of a transformers model, with or without a peft wrapper."""
    with torch.no_grad():
        more = {"decoder_input_ids": _shifted(tokens)} if is_t5 else {}
        return model(input_ids=tokens, **more).logits[..., :VOCAB]


def _shifted(tokens: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
