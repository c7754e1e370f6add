"""One file for each experiment: which recipes, which measurements."""
