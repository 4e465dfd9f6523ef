"""NeMo's files of prompt learning, until 1.22, train with the fixes that are printed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from config_helpers import write
from run_metrics import metric_rows
from tiers import full_only

from stoker.trainer.cli.main import main
from stoker.trainer.utils.errors import EXIT_OK

TRAINER = """\
name: tuned
trainer: {devices: 1, accelerator: gpu, num_nodes: 1, precision: 32, logger: False, enable_checkpointing: False,
  use_distributed_sampler: False, max_epochs: 3, max_steps: -1, log_every_n_steps: 10, val_check_interval: 1.0,
  gradient_clip_val: 1.0}
exp_manager: {explicit_log_dir: null, exp_dir: null, name: '${name}', create_wandb_logger: False,
  wandb_logger_kwargs: {project: null, name: null}, resume_if_exists: True, resume_ignore_no_checkpoint: True,
  create_checkpoint_callback: True, checkpoint_callback_params: {monitor: val_loss, save_top_k: 2, mode: min,
  save_nemo_on_train_end: False, model_parallel_size: '${model.tensor_model_parallel_size}', save_best_model: True}}
model:
  {seed: 1234, nemo_path: '${name}.nemo', virtual_prompt_style: p-tuning, tensor_model_parallel_size: 1,
   pipeline_model_parallel_size: 1, global_batch_size: 4, micro_batch_size: 2, validation_drop_last: False,
   validation_global_batch_size: '${model.global_batch_size}', validation_micro_batch_size: '${model.micro_batch_size}',
   report_validation_metric: False, validation_metric: accuracy, restore_path: null, language_model_path: '???',
   save_nemo_on_validation_end: True, existing_tasks: [boolq], new_tasks: [rte], p_tuning: {ENCODER, dropout: 0.0},
   prompt_tuning: {new_prompt_init_methods: [text], new_prompt_init_text: [some]},
   task_templates: [{taskname: rte, prompt_template: '<|VIRTUAL_PROMPT_0|>{premise} {answer}', total_virtual_tokens: 9,
    virtual_token_splits: [9], truncate_field: null, answer_field: answer}],
   data: {train_ds: [FILE], validation_ds: [FILE], add_eos: True, shuffle: True, num_workers: 0, pin_memory: True,
    DATA},
   optim: {name: fused_adam, lr: 1e-4, weight_decay: 0.01, betas: [0.9, 0.98], sched: {name: CosineAnnealing,
    warmup_steps: 1, min_lr: 0.0, constant_steps: 0, monitor: val_loss, reduce_on_plateau: false}}}
"""
GPT = {
    "ENCODER": "encoder_type: tpmlp, num_layers: 2, encoder_hidden: 64, init_std: 0.023",
    "DATA": "train_cache_data_path: null, load_cache: False, max_seq_length: 48, min_seq_length: 1",
}
T5 = {
    "ENCODER": "encoder_type: mlp, num_layers: 2",
    "DATA": "add_bos: false, decoder_starts_with_pad: False, add_eos_to_decoder_output: True,"
    " add_sentinel_to_input: True, ul2_prompt_token: null",
}
SHORT = ["trainer.accelerator=cpu", "trainer.val_check_interval=3", "trainer.limit_val_batches=1"]
VALUES = {"TEXT": "'{premise} {answer}'", "context_key=KEY": "context_key=premise", "label_key=KEY": "label_key=answer"}


@full_only
@pytest.mark.parametrize(("family", "replaced"), [("gpt", GPT), ("t5", T5)])
def test_three_steps(family: str, replaced: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`stoker finetune` with all that it advises, in at most three rounds."""
    base, run, examples = tmp_path / "base", tmp_path / "run", tmp_path / "rte.jsonl"
    examples.write_text("".join(json.dumps({"premise": f"it is {n}", "answer": "yes"}) + "\n" for n in range(16)))
    small = [
        f"model={family}_tiny",
        "model.data.data_impl=mock",
        "model.micro_batch_size=1",
        "model.global_batch_size=1",
    ]
    assert main(["train", *small, *SHORT, "trainer.max_steps=1", f"exp_manager.explicit_log_dir={base}"]) == EXIT_OK
    text = TRAINER.replace("FILE", str(examples))
    for name, value in replaced.items():
        text = text.replace(name, value)
    write(tmp_path, "tuning", text)
    words = [*SHORT, "trainer.max_steps=3", f"exp_manager.explicit_log_dir={run}", f"model.restore_from_path={base}"]
    given = ["finetune", "--config-dir", str(tmp_path), "--config-name", "tuning"]
    for _ in range(3):
        if main([*given, *words]) == EXIT_OK:
            break
        for fix in re.findall(r"^    fix: (.*)$", capsys.readouterr().err, re.MULTILINE):
            for name, value in VALUES.items():
                fix = fix.replace(name, value)
            words += [word for word in shlex.split(fix) if word not in words]
    else:
        pytest.fail("the advice does not end")
    assert [row["step"] for row in metric_rows(run) if "lr" in row][-1] == 3
    warnings = capsys.readouterr().err
    assert "prompt_template" not in warnings
    assert "ptuning" in (run / "run.log").read_text()
