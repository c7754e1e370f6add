"""One typed record for every measured number, and the files that carry such records from a run to its report.

A results file says what was measured (`Result`), how arms compare (`Comparison`), on what, by which command and from
which code (`Environment`). Reading one loads neither torch nor numpy.
"""

from diff_transformer.files import read_json
from diff_transformer.results.comparison import compare, remark_on_seeds, seeds_needed, verdict
from diff_transformer.results.environment import capture_environment, capture_results, command_line, device_name
from diff_transformer.results.files import (
    number_of,
    parse_metrics_line,
    read_attention,
    read_metrics,
    read_results,
    read_samples,
    write_json,
    write_text,
)
from diff_transformer.results.floors import judge
from diff_transformer.results.intervals import (
    bootstrap_interval,
    mean_interval,
    proportion_interval,
    variance_beyond_chance,
)
from diff_transformer.results.records import (
    AttentionExample,
    Baseline,
    Better,
    Claimant,
    Comparison,
    Environment,
    Headline,
    Interval,
    Result,
    ResultsFile,
    Samples,
    Verdict,
)

__all__ = [
    "AttentionExample",
    "Baseline",
    "Better",
    "Claimant",
    "Comparison",
    "Environment",
    "Headline",
    "Interval",
    "Result",
    "ResultsFile",
    "Samples",
    "Verdict",
    "bootstrap_interval",
    "capture_environment",
    "capture_results",
    "command_line",
    "compare",
    "device_name",
    "judge",
    "mean_interval",
    "number_of",
    "parse_metrics_line",
    "proportion_interval",
    "read_attention",
    "read_json",
    "read_metrics",
    "read_results",
    "read_samples",
    "remark_on_seeds",
    "seeds_needed",
    "variance_beyond_chance",
    "verdict",
    "write_json",
    "write_text",
]
