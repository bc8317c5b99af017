"""What the stages' configs share, and how a config is read."""
