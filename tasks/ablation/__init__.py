"""Ablation: methods of a stage compared over seeds."""
