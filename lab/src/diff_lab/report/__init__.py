"""Draws figures, tables and pages from result files alone: a report can be drawn again without a model."""
