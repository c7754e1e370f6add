"""Table 1: the harness without examples. The paper sets a model of 3B parameters beside other people's."""

from collections.abc import Sequence

from diff_transformer.eval import table_1
from diff_transformer.experiments.cluster import Evaluation, PaperPreset, Stage
from diff_transformer.experiments.framework import TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.harness_twins import (
    NOTES,
    alone,
    check_tasks,
    harness_baselines,
    harness_comparisons,
    harness_presets,
    harness_records,
)
from diff_transformer.results import Comparison, Result

# The paper trained no Transformer of its own on as many tokens; other people's are no twins.
PAPER = {
    **{
        (f"harness/{task}/{measure}", "0-shot"): alone(value)
        for (task, measure), value in zip(table_1.TABLE_1_MEASURES.items(), table_1.TABLE_1["DIFF-3B"], strict=True)
    },
    (table_1.AVERAGE, "0-shot"): alone(0.606),
}


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    return harness_records(run, preset.options, 0)


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    return harness_comparisons(records, PAPER)


TABLE_1 = Experiment(
    name="table1",
    shows="lm-evaluation-harness without examples (Table 1): the path, without a verdict",
    presets={
        **harness_presets(cpu_minutes=0.5, shots=(0,)),
        "paper": PaperPreset(
            # 1T tokens.
            stages=(Stage(recipe="paper-3b", overrides=("train.steps=238419",), name="paper-3b-1t"),),
            arms=TWINS[:1],
            evaluations=(Evaluation(tasks="table1", num_fewshot=0),),
            remarks=("The paper trained no Transformer of its own on as many tokens: it compares other people's.",),
        ),
    },
    compare=_compare,
    measure=_measure,
    check=check_tasks,
    baselines=lambda recipe, options: harness_baselines(recipe, options, (0,)),
    notes=(
        *NOTES,
        "The paper's averages after 1T tokens: DIFF-3B 60.6, OpenLLaMA-3B-v2 57.5, StableLM-base-alpha-3B-v2 56.8; the "
        "latter two are other people's models. For a checkpoint of your own: diff-transformer eval CHECKPOINT --tasks "
        "table1.",
    ),
)
