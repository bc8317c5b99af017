"""Fixtures of a byte-level tokenizer."""

from tokenizer_dirs import chat_template, make_model_dir, model_dir

__all__ = ["chat_template", "make_model_dir", "model_dir"]
