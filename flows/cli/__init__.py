"""The command line: `rlhf`."""
