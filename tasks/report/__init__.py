"""The kit that every stage's report uses."""
