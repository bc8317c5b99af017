"""A small synthetic preference world with a known right answer, used as the embedded default."""
