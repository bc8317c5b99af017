"""Servers and workers on this machine, and deployments to any."""
