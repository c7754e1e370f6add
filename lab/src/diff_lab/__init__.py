"""The laboratory gathers evidence: measurements, experiments, benchmarks, records, statistics and reports."""
