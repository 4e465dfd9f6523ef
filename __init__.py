"""stoker: trains and fine-tunes GPT and T5 transformers from Hydra YAML with NeMo's keys."""

__version__ = "0.1.0"
