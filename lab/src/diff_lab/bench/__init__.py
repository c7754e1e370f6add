"""Times the operator and whole models relative to the Transformer's, in the same process."""
