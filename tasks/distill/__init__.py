"""Distillation of the aligned policy into a LoRA student."""
