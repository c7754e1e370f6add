"""Benchmarks of the operator and of whole models: times relative to the Transformer's, measured in the same process."""
