"""Training-step benchmark of two models and their peers; see `rounds.py` for the method.

    python scripts/bench/training_step.py [--model gpt gpt2] [--rounds 3] [--only stoker hf ...] [--seconds 500]
        [--results FILE.jsonl]

`gpt` is `experiment=llama_1b_bench`, `gpt2` is GPT-2 124M: 1,024 tokens, micro batch 32, no dropout.
"""

from __future__ import annotations

from typing import NamedTuple

import gpt2_peers
import peers
import torch
from peers import Peers, Shape, Step, with_random_tokens
from rounds import Length, Row, result, run_benchmark, stoker_result, time_windows


def stoker_loop(shape: Shape) -> Step:
    """Train step of stoker's model and optimizer without Lightning, dataloader and logging; of the model `gpt`."""
    from stoker.kernels.attention.flags import read_flags
    from stoker.models.build import build_model
    from stoker.models.config.batch_shape import BatchSpec
    from stoker.models.config.gpt import GPTKeys
    from stoker.models.gpt import GPT
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.optim.adamw import AdamW

    keys = load_run_config(None, None, MODELS["gpt"].overrides).root.model
    assert isinstance(keys, GPTKeys)
    model = build_model(
        keys,
        vocab_size=keys.override_vocab_size or 0,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        flags=read_flags(),
        micro_batch_size=shape.micro_batch,
        batch_spec=BatchSpec(seq_length=keys.encoder_seq_length),
    )
    assert isinstance(model, GPT)
    optimizer = AdamW(
        model.named_parameters(),
        lr=1e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        main_weights=True,
        clip_norm=1.0,
    )

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model.loss(tokens, labels, float(labels.numel()))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Model(NamedTuple):
    """Shape of a model, the overrides of `stoker train` for it, and what it is compared with."""

    shape: Shape
    overrides: list[str]
    peers: Peers

    @property
    def titles(self) -> dict[str, str]:
        own = {"stoker": f"stoker: `stoker train {self.overrides[0]}`"}
        own |= {name: title for name, (title, _) in PURE.items()}
        return own | {name: title for name, (title, _) in self.peers.items()}


PURE = {"stoker_bf16": ("stoker, `trainer.precision=bf16-true`", ["trainer.precision=bf16-true"])}
"""Weights and moments in bf16."""
LOOP: Peers = {"stoker_loop": ("stoker's model, optimizer and kernels in a bare loop", stoker_loop)}
MODELS = {
    "gpt": Model(Shape(), ["experiment=llama_1b_bench"], LOOP | peers.PEERS),
    "gpt2": Model(
        gpt2_peers.GPT2,
        [
            *("model=gpt2_124m", "data=mock", "trainer=gpu", "trainer.limit_val_batches=0"),
            *("model.micro_batch_size=32", "model.global_batch_size=32"),
            *("model.hidden_dropout=0", "model.attention_dropout=0", "exp_manager.create_checkpoint_callback=false"),
        ],
        gpt2_peers.PEERS,
    ),
}


def measure(name: str, case: str) -> Row:
    """Run one contender in this process."""
    model = MODELS[case]
    tokens = model.shape.micro_batch * model.shape.sequence
    if name == "stoker" or name in PURE:
        more = PURE[name][1] if name in PURE else []
        return stoker_result(name, [*model.overrides, *more], Length(), tokens)
    step = with_random_tokens(model.peers[name][1](model.shape), model.shape)
    return result(name, time_windows(step, Length()), tokens)


if __name__ == "__main__":
    run_benchmark(
        __file__,
        __doc__,
        dict.fromkeys(name for model in MODELS.values() for name in model.titles),
        measure,
        lambda case: [f"training_step_{case}"],
        option="--model",
        cases=list(MODELS),
        chosen=lambda case: MODELS[case].titles,
    )
