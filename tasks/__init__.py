"""What flows are made of: stages, and under them runtime, tracking, models, data, algorithms."""
