"""The Bradley-Terry reward model: training, report, scores of files."""
