"""The LightningModule, its Trainer, and CUDA graphs of a micro batch."""
