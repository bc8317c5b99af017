"""The only modules that import Ray, verl or an inference engine."""
