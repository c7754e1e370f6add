"""Figures, tables and pages, made from result files alone: a report can be drawn again without a model."""
