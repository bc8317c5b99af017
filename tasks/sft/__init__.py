"""Behaviour cloning: the base model."""
