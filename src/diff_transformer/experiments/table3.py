"""Table 3: attention to the answer and attention noise, by the depth of the needle."""

from collections.abc import Sequence
from dataclasses import replace

from diff_transformer.eval.needles import DEPTHS, attention_records, depth_name
from diff_transformer.experiments.cluster import THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.framework import ACCURACY as BY_ACCURACY
from diff_transformer.experiments.framework import TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.needles import CPU, NOTES, ON_GPU, attention_by_depth, check_cells
from diff_transformer.results import Comparison, Headline, Result, compare

# By depth: DIFF, the Transformer.
PAPER = {
    "attention_to_answer": ((0.27, 0.30, 0.31, 0.32, 0.40), (0.03, 0.03, 0.03, 0.07, 0.09)),
    "attention_noise": ((0.01, 0.02, 0.02, 0.02, 0.01), (0.51, 0.54, 0.52, 0.49, 0.49)),
}
DEFINITIONS = ("share", "signed")


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    masses = attention_by_depth(run, preset.options["needles"], preset.options["samples"])
    return attention_records(masses, run.arm.name, run.seed)


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    measured = {record.group for record in records}
    found = []
    for kind, (diff, transformer) in PAPER.items():
        for definition in DEFINITIONS:
            for depth, *paper in zip(DEPTHS, diff, transformer, strict=True):
                if depth_name(depth) in measured:
                    values = (paper[0], paper[1])
                    name, group = f"needles/{kind}_{definition}", depth_name(depth)
                    # Rows that add up to 1 − λ have less of everything, noise and answer, before anything is learnt.
                    claimed = definition == "share"
                    found.append(compare(records, name, "diff", "softmax", group=group, paper=values, claimed=claimed))
    return found


TABLE_3 = Experiment(
    name="table3",
    shows="attention to the answer and attention noise, by the needle's depth and by both definitions (Table 3)",
    presets={
        "cpu": replace(CPU, options={"needles": 4, "samples": 200}, minutes=7),
        "gpu": replace(ON_GPU, options={"needles": 6, "samples": 20}, minutes=25),
        "paper": PaperPreset(
            stages=(THREE_BILLION,),
            arms=TWINS,
            evaluations=(
                Evaluation(
                    measure="needle_attention", options={"needles": 6, "queried": 1, "length": 4096, "samples": 50}
                ),
            ),
            remarks=("The paper does not say how many needles and samples its Table 3 has; these are Table 2's.",),
        ),
    },
    measure=_measure,
    compare=_compare,
    check=lambda options, data: check_cells(data, [(options["needles"], 1)]),
    validation=BY_ACCURACY,
    headline=lambda _: Headline(name="needles/attention_to_answer_share", group=depth_name(DEPTHS[0])),
    notes=(
        *NOTES,
        "The paper does not state how it normalises: signed is the sum of the weights of A1 − λ A2, share the sum of "
        "their absolute values over that of the row. Its values are put beside both. Signed rows of DIFF add up to "
        "1 − λ and those of the Transformer to 1: DIFF's signed noise is lower and its signed attention to the answer "
        "is less by that factor whatever it has learnt, so verdicts are on shares alone.",
    ),
)
