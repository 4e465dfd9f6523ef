"""Build plans for tests."""

from config_helpers import load
from resolved import gpu_target, make_plan

from stoker.trainer.plan.hardware import parse_gpu

LLAMA = "experiment=llama_1b_bench"
ONE = ["model.micro_batch_size=1", "model.global_batch_size=1"]
FULL = [
    "model.activations_checkpoint_granularity=full",
    "model.activations_checkpoint_method=uniform",
    "model.activations_checkpoint_num_layers=1",
]
OFFLOAD = ["model.cpu_offloading=True", "model.cpu_offloading_num_layers=12"]


def planned(*overrides, card="h200", world=1):
    root = load(*overrides).root
    return make_plan(root, gpu_target(root, parse_gpu(card)), world_size=world)
