"""Parameter-efficient fine-tuning (PEFT) modules."""
