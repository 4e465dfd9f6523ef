"""Measure expert load with and without the load-balancing loss: `experiment=moe_pystd`, several seeds of each.

    python scripts/moe_balance.py [--steps 400] [--seeds 1 2 3] [--out docs/results]

Six runs of a small model on a CPU, a few minutes on two cores. Writes to `--out`

    moe_balance.json    load CV and losses of each run at every log interval, and the validation loss
    moe_balance.png     load CV of all runs over steps (needs matplotlib)
    moe_load_*.png      load of every expert over steps, for the first seed with and without the loss

The load CV (coefficient of variation) is the standard deviation of the token counts of a layer's experts over their
mean, counted over ten steps and averaged over layers. 0 is an even load, 1.73 is all tokens on two of eight experts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from stoker.trainer.config.load import load_run_config
from stoker.trainer.loggers.expert_load_map import has_matplotlib
from stoker.trainer.train import run_training

KINDS = {"with": "1e-2", "without": "0.0"}
"""Value of `model.moe_aux_loss_coeff` for each kind of run."""
FIGURES = ("step", "loss", "load_cv", "expert_share_max", "load_balancing_loss", "z_loss", "router_entropy")
LAST = 0.25
"""Fraction of the steps, at the end of a run, that the summary averages."""


def train(kind: str, seed: int, steps: int, directory: Path) -> dict[str, Any]:
    """Train one run and return its metrics at every log interval."""
    overrides = [
        "experiment=moe_pystd",
        f"model.seed={seed}",
        f"model.moe_aux_loss_coeff={KINDS[kind]}",
        "model.moe_per_layer_logging=false",
        f"trainer.max_steps={steps}",
        f"trainer.val_check_interval={steps}",
        "trainer.log_every_n_steps=10",
        "exp_manager.create_checkpoint_callback=false",
        "exp_manager.create_tensorboard_logger=false",
        f"exp_manager.explicit_log_dir={directory}",
    ]
    result = run_training(load_run_config(None, None, overrides))
    assert result.validation is not None
    lines = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    reports = [line for line in lines if "load_cv" in line]
    return {
        "kind": kind,
        "aux_loss_coeff": float(KINDS[kind]),
        "seed": seed,
        "val_loss": result.validation.loss,
        **{name: [report[name] for report in reports] for name in FIGURES},
    }


def last_mean(run: dict[str, Any], name: str) -> float:
    values = run[name]
    return mean(values[-max(1, round(LAST * len(values))) :])


def summary(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table: one row for each kind of run, with all its seeds."""
    rows = [
        f"| load-balancing loss | load CV, last {LAST:.0%} of steps | largest share of an expert | validation loss |",
        "|---|---|---|---|",
    ]
    runs = list(runs)
    for kind, coefficient in KINDS.items():
        own = [run for run in runs if run["kind"] == kind]
        cells = [", ".join(f"{last_mean(run, name):.2f}" for run in own) for name in ("load_cv", "expert_share_max")]
        losses = ", ".join(f"{run['val_loss']:.3f}" for run in own)
        rows.append(f"| {kind} (coefficient {float(coefficient):g}) | {cells[0]} | {cells[1]} | {losses} |")
    return rows


def draw(runs: Iterable[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained", dpi=120)
    axes = figure.subplots()
    colours = dict(zip(KINDS, ("tab:blue", "tab:red"), strict=True))
    labelled: set[str] = set()
    for run in runs:
        kind = run["kind"]
        label = None if kind in labelled else f"{kind} the load-balancing loss ({run['aux_loss_coeff']:g})"
        labelled.add(kind)
        axes.plot(run["step"], run["load_cv"], color=colours[kind], linewidth=1.2, label=label)
    axes.set(xlabel="step", ylabel="load CV, mean of the layers", ylim=(0, None), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for kind in KINDS:
                directory = Path(folder) / f"{kind}-{seed}"
                runs.append(train(kind, seed, options.steps, directory))
                if seed == options.seeds[0] and has_matplotlib():
                    (options.out / f"moe_load_{kind}.png").write_bytes((directory / "expert_load.png").read_bytes())
    document = {"experiment": "moe_pystd", "steps": options.steps, "runs": runs}
    text = json.dumps(document, separators=(",", ":"))
    (options.out / "moe_balance.json").write_text(text + "\n", encoding="utf-8")
    if has_matplotlib():
        draw(runs, options.out / "moe_balance.png")
    else:
        print("figures need matplotlib; run `pip install 'stoker[plots]'`")
    print("\n".join(summary(runs)))


if __name__ == "__main__":
    main()
