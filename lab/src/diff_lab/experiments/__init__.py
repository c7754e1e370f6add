"""Repeats the tables and figures of the paper: trains variants alike, measures them, and compares them."""
