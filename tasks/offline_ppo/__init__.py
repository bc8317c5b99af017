"""Offline PPO on stored responses."""
