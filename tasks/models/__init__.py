"""Model sources, loading and the tiny model built from scratch."""
