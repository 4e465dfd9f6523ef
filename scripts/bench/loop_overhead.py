"""Cost of the training loop: `stoker train`, and `stoker.GPTModule` in a plain `pl.Trainer`, against a bare loop.

python scripts/bench/loop_overhead.py [--rounds 3] [--case short long] [--only loop stoker ...] [--seconds 500]
    [--results FILE.jsonl]

The bare loop runs the same model, kernels and optimizer on a batch that is already on the GPU: no dataloader, no
schedule, no metrics. `stoker train` logs every 10 steps. CUDA graphs are off unless a title says otherwise, since the
bare loop has none. Method: `rounds.py`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from rounds import Length, Row, result, run_benchmark, stoker_result, time_windows

CASES = {
    "short": ["model=gpt_tiny", "model.micro_batch_size=8", "model.global_batch_size=8"],
    "long": ["model=gpt_125m", "model.micro_batch_size=16", "model.global_batch_size=16"],
}
"""Steps of a few and of tens of milliseconds on an H100."""
COMMON = [
    *(
        "data=mock",
        "trainer=gpu",
        "trainer.precision=bf16",
        "trainer.limit_val_batches=0",
        "trainer.enable_progress_bar=False",
    ),
    *("model.override_vocab_size=32000", "model.hidden_dropout=0", "model.attention_dropout=0"),
    *("exp_manager.checkpoint_callback_params.save_top_k=0", "exp_manager.checkpoint_callback_params.save_last=False"),
]
TITLES = {
    "loop": "bare loop",
    "stoker": "`stoker train`",
    "stoker_graph": "`stoker train` with CUDA graphs",
    "lightning": "`stoker.GPTModule` in `pl.Trainer`, logging every step's loss and norm",
    "lightning_barebones": "`stoker.GPTModule` in `pl.Trainer(barebones=True)`",
}
LENGTH = Length(warm_up=30, windows=5, window=50)


def configured(case: str, *more: str) -> Any:
    import stoker

    return stoker.load_config([*CASES[case], *COMMON, *more])


def tokens_of(case: str) -> int:
    keys = configured(case).root.model
    return keys.micro_batch_size * keys.encoder_seq_length


def bare_loop(case: str) -> list[float]:
    """Return the seconds per step of forward, backward and update alone."""
    from stoker.trainer.config.resolved_run import resolve_run
    from stoker.trainer.core.run_checks import choose_attention
    from stoker.trainer.core.training_state import build_model, build_optimizer

    device, root = torch.device("cuda", 0), configured(case).root
    run = resolve_run(root, world_size=1, capability=torch.cuda.get_device_capability())
    model = build_model(run, 32000, device, choose_attention(run, device))
    optimizer = build_optimizer(run, model)
    shape = (root.model.micro_batch_size, root.model.encoder_seq_length)
    batch = {name: torch.randint(0, 32000, shape, device=device) for name in ("tokens", "labels")}
    targets = torch.tensor(float(batch["labels"].numel()), device=device)

    def step() -> None:
        model.batch_loss(batch, targets).backward()
        optimizer.step()

    return time_windows(step, LENGTH)


def lightning(case: str, **arguments: Any) -> list[float]:
    """Return the seconds per step of a plain Trainer."""
    import pytorch_lightning as pl

    import stoker

    seconds: list[float] = []

    class Clock(pl.Callback):
        start = 0.0

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            steps = trainer.global_step - LENGTH.warm_up
            if steps >= 0 and steps % LENGTH.window == 0:
                torch.cuda.synchronize()
                if steps:
                    seconds.append((time.perf_counter() - self.start) / LENGTH.window)
                self.start = time.perf_counter()

    config = configured(case)
    torch.cuda.reset_peak_memory_stats()
    steps = LENGTH.warm_up + LENGTH.windows * LENGTH.window
    trainer = pl.Trainer(accelerator="gpu", devices=1, max_steps=steps, callbacks=[Clock()], **arguments)
    trainer.fit(stoker.GPTModule(config), stoker.TokenDataModule(config))
    return seconds


def measure(name: str, case: str) -> Row:
    """Run one contender in this process."""
    tokens = tokens_of(case)
    if name.startswith("stoker"):
        graph = f"model.enable_cuda_graph={name == 'stoker_graph'}"
        return stoker_result(name, [*CASES[case], *COMMON, graph], LENGTH, tokens)
    if name == "loop":
        return result(name, bare_loop(case), tokens)
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    arguments = plain if name == "lightning" else {"barebones": True}
    return result(name, lightning(case, **arguments), tokens)


if __name__ == "__main__":
    run_benchmark(
        __file__,
        __doc__,
        TITLES,
        measure,
        lambda case: [f"loop_{case}"],
        option="--case",
        cases=list(CASES),
    )
