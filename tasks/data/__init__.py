"""Preference data: schemas, HH-RLHF parsing, the renderer, pairs on disk, question files."""
