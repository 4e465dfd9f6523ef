"""Training-step benchmark of `experiment=llama_1b_bench` and its peers; see `rounds.py` for the method.

python scripts/bench/training_step.py [--rounds 3] [--only stoker hf ...] [--seconds 500]
    [--results FILE.jsonl]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from peers import PEERS, Shape, Step
from rounds import Length, Row, result, run_benchmark, stoker_result, time_windows

OVERRIDES = ["experiment=llama_1b_bench"]
TITLES = {
    "stoker": "stoker: `stoker train experiment=llama_1b_bench`",
    "stoker_loop": "stoker's model, optimizer and kernels in a bare loop",
    **{name: title for name, (title, _) in PEERS.items()},
}
TOKENS = Shape.micro_batch * Shape.sequence


def stoker_loop(_: Shape) -> Step:
    """Train step of stoker's model and optimizer without Lightning, dataloader and logging."""
    from stoker.kernels.attention.flags import read_flags
    from stoker.models.build import build_model
    from stoker.models.config.batch_shape import BatchSpec
    from stoker.models.config.gpt import GPTKeys
    from stoker.models.gpt import GPT
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.optim.adamw import AdamW

    keys = load_run_config(None, None, OVERRIDES).root.model
    assert isinstance(keys, GPTKeys)
    model = build_model(
        keys,
        vocab_size=keys.override_vocab_size or 0,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        flags=read_flags(),
        micro_batch_size=Shape.micro_batch,
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


def windows_of(build: Callable[[Shape], Step], shape: Shape) -> list[float]:
    """Return seconds per step, with new random tokens in every step."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    step = build(shape)

    def run() -> None:
        size = (shape.micro_batch, shape.sequence + 1)
        drawn = torch.randint(0, shape.vocab, size, device="cuda", generator=generator)
        step(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())

    return time_windows(run, Length())


def measure(name: str, _: str) -> Row:
    """Run one contender in this process."""
    if name == "stoker":
        return stoker_result(name, OVERRIDES, Length(), TOKENS)
    builders: dict[str, Callable[[Shape], Step]] = {n: build for n, (_, build) in PEERS.items()}
    builders["stoker_loop"] = stoker_loop
    return result(name, windows_of(builders[name], Shape()), TOKENS)


if __name__ == "__main__":
    run_benchmark(__file__, __doc__, TITLES, measure, lambda _: ["training_step"])
