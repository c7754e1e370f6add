"""Table 8: the harness without and with five examples, of twins after 350B tokens."""

from collections.abc import Sequence

from diff_transformer.eval.table_1 import AVERAGE
from diff_transformer.experiments.framework import Experiment, MeasuredRun, Preset
from diff_transformer.experiments.harness_twins import (
    NOTES,
    check_tasks,
    harness_baselines,
    harness_comparisons,
    harness_presets,
    harness_records,
)
from diff_transformer.results import Comparison, Result

# DIFF and its Transformer, 3B parameters each. BoolQ is where DIFF is the worse one.
PAPER = {
    (AVERAGE, "0-shot"): (0.562, 0.554),
    (AVERAGE, "5-shot"): (0.580, 0.564),
    ("harness/boolq/acc", "0-shot"): (0.601, 0.629),
}
SHOTS = (0, 5)


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    return [record for shots in SHOTS for record in harness_records(run, preset.options, shots)]


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    return harness_comparisons(records, PAPER)


TABLE_8 = Experiment(
    name="table8",
    shows="lm-evaluation-harness without and with five examples (Table 8): the path, without a verdict",
    presets=harness_presets(cpu_minutes=0.5, shots=SHOTS),
    compare=_compare,
    measure=_measure,
    check=check_tasks,
    baselines=lambda recipe, options: harness_baselines(recipe, options, SHOTS),
    notes=(
        *NOTES,
        "The paper's averages after 350B tokens, Transformer and DIFF: 55.4 and 56.2 without examples, 56.4 and 58.0 "
        "with five.",
    ),
)
