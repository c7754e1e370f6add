"""Measures trained models; each measurement also runs on a checkpoint alone, by `diff-lab eval`."""
