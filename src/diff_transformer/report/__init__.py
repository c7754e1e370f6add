"""Figures, tables and pages, made from result files alone: a report can be drawn again without a model."""

from diff_transformer.report.experiment_files import holds_experiments
from diff_transformer.report.experiments import build_results_report, results_report_files
from diff_transformer.report.harness import harness_table
from diff_transformer.report.page import build_demo_report, build_run_report, run_report_path
from diff_transformer.report.table import demo_table
from diff_transformer.report.verdicts import arms_table, verdict_table

__all__ = [
    "arms_table",
    "build_demo_report",
    "build_results_report",
    "build_run_report",
    "demo_table",
    "harness_table",
    "holds_experiments",
    "results_report_files",
    "run_report_path",
    "verdict_table",
]
