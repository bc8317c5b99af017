"""Benchmarks against other libraries; `make bench` runs them, pytest does not."""
