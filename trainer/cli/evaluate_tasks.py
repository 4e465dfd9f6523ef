"""`stoker evaluate --tasks`: run tasks of the lm-evaluation-harness on a checkpoint."""

from __future__ import annotations

import argparse
import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..utils.errors import EXIT_OK, UserError
from .common_arguments import positive_int
from .early_checks import check_model_path

TASKS = Path(__file__).parents[1] / "evaluation/harness/tasks"
"""Folder of stoker's own tasks, which need no network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for tasks."""
    parser.add_argument(
        "--tasks",
        metavar="NAME,...",
        help="run tasks of the lm-evaluation-harness instead (stoker[eval]); docstring_choice, docstring_source and "
        "docstring_write need no network",
    )
    parser.add_argument("--tasks-dir", metavar="DIR", type=Path, help="folder with YAML files of your own tasks")
    parser.add_argument("--num-fewshot", metavar="N", type=int, help="few-shot examples before each question")
    parser.add_argument(
        "--apply-chat-template", action="store_true", help="format the questions with the model's chat template"
    )
    parser.add_argument("--limit-docs", metavar="N", type=positive_int, help="only the first N questions of each task")


def has_tasks(args: argparse.Namespace) -> bool:
    """Return True if --tasks is given.

    Raises:
        UserError: options for tasks are combined with options for the run's own data.
    """
    task_options = {"--tasks-dir": args.tasks_dir, "--num-fewshot": args.num_fewshot, "--limit-docs": args.limit_docs}
    task_options["--apply-chat-template"] = args.apply_chat_template or None
    data_options = {"--data-path": args.data_path, "--limit-batches": args.limit_batches}
    if args.tasks is not None and args.pipeline_parallel > 1:
        data_options["--pipeline-parallel"] = args.pipeline_parallel
    unused = task_options if args.tasks is None else data_options
    if wrong := [name for name, value in unused.items() if value is not None]:
        needs = "needs --tasks" if args.tasks is None else "applies to the run's own data; leave it out with --tasks"
        raise UserError(f"{', '.join(wrong)} {needs}")
    return args.tasks is not None


def run(args: argparse.Namespace, checkpoint: Path) -> int:
    """Run the tasks on a checkpoint and print their metrics.

    Raises:
        UserError: the harness is not installed, or an unknown task or invalid option is given.
    """
    if find_spec("lm_eval") is None:
        raise UserError("--tasks: the lm-evaluation-harness is not installed; pip install 'stoker[eval]'")
    if args.tasks_dir is not None and not args.tasks_dir.is_dir():
        raise UserError(f"--tasks-dir {args.tasks_dir}: there is no such folder")
    if args.num_fewshot is not None and args.num_fewshot < 0:
        raise UserError(f"--num-fewshot {args.num_fewshot} must be at least 0")
    check_model_path(checkpoint)
    from lm_eval import evaluator

    from ..evaluation.harness.lm_eval_model import StokerLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = [name for name in args.tasks.split(",") if name]
    manager = _task_manager(names, args.tasks_dir)
    model = StokerLM(checkpoint, args.device, batch_size=args.batch_size or "auto", base=args.base, ema=args.ema)
    evaluate: Any = evaluator.simple_evaluate
    results = evaluate(
        model=model,
        tasks=names,
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit_docs,
        apply_chat_template=args.apply_chat_template,
        log_samples=False,
        bootstrap_iters=1000,
    )
    rows = _figures(results["results"])
    if args.json:
        info = model.get_model_info()
        print(json.dumps({"checkpoint": info["model_checkpoint"], "step": info["model_step"], "tasks": rows}))
        return EXIT_OK
    for task, figures in rows.items():
        print(task)
        for name, value in figures.items():
            print(f"  {name:<28} {value:.4f}")
    return EXIT_OK


def _task_manager(names: list[str], folder: Path | None) -> Any:
    """Return a task manager for these tasks; the harness's own 14,000 tasks are loaded only if needed.

    Raises:
        UserError: unknown task.
    """
    from lm_eval.tasks import TaskManager

    folders: list[str | Path] = [TASKS, *([] if folder is None else [folder])]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if set(names) <= set(manager.all_tasks):
        return manager
    manager = TaskManager(include_path=folders)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        from ..config.suggest import closest

        suggestion = closest(unknown[0], manager.all_tasks)
        hint = f"; did you mean {suggestion}?" if suggestion else "; `lm-eval ls tasks` lists them"
        raise UserError(f"--tasks: the harness has no task {', '.join(unknown)}{hint}")
    return manager


def _figures(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the numeric metrics of each task, named with their filter unless that is `none`."""
    return {
        task: {
            key.removesuffix(",none"): float(value)
            for key, value in figures.items()
            if "," in key and isinstance(value, int | float)
        }
        for task, figures in results.items()
    }
