"""Figures, tables and pages, made from result files alone: a report can be drawn again without a model."""

from diff_transformer.lab.report.experiment_tables import holds_experiments, variants_table, verdict_table
from diff_transformer.lab.report.experiments_report import build_results_report, results_report_files
from diff_transformer.lab.report.measured_tables import demo_table, harness_table, measure_table
from diff_transformer.lab.report.run_pages import build_demo_report, build_run_report, run_report_path

__all__ = [
    "build_demo_report",
    "build_results_report",
    "build_run_report",
    "demo_table",
    "harness_table",
    "holds_experiments",
    "measure_table",
    "results_report_files",
    "run_report_path",
    "variants_table",
    "verdict_table",
]
