"""Evaluation: answers to two-turn questions, their judges, the report."""
