"""How fast the operator and the model are, as ratios to the twin measured in the same process."""
