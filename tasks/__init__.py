"""What the flows are made of: stage tasks, and under them backends, models, data and algorithms."""
