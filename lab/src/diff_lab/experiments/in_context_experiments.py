"""Defines the experiments on many-shot classification (Figure 6) and the order of demonstrations (Figure 7)."""

from dataclasses import replace

from diff_lab.coordinates import Coordinates
from diff_lab.experiments.experiment import ComparisonRule, Experiment, Preset, compared_by, section
from diff_lab.experiments.needle_experiments import SYNTHETIC_TASK
from diff_lab.experiments.paper_preset import LONG_CONTEXTS, THREE_BILLION, PaperPreset, evaluation
from diff_lab.measure import many_shot
from diff_lab.record import Headline

# Two cores. With these first weights, classes and batches the Transformer learns the task as well (docs/log.md).
MANY_SHOT_CPU = Preset(
    recipe="retrieval",
    overrides=(
        *SYNTHETIC_TASK,
        "model.initializer_range=0.05",
        *section("train", steps=5000, schedule="cosine", evaluate_every=100),
        "data={kind: many_shot, shots: 24, classes: 4, labels: 8, words: 8, item_length: 1, vary: true}",
        "data.batch_size=64",
    ),
    learning_rates=(1.5e-3, 3e-3, 6e-3),
    # With one seed the Transformer may learn at a rate with which it does not with others.
    sweep_seeds=2,
    # Three left it open, and eight were said to find the difference in 80 % of repetitions (docs/log.md).
    seeds=8,
)
# One H200: more classes, items of two words, longer sequences.
MANY_SHOT_GPU = Preset(
    recipe="retrieval",
    overrides=(
        *section("model", hidden_size=256, intermediate_size=688, num_hidden_layers=4, head_dim=32, rope_theta=1000),
        "data={kind: many_shot, shots: 256, classes: 50, labels: 256, words: 200, item_length: 2, vary: true}",
        "data.batch_size=64",
        *section("train", steps=6000, precision="bf16", inspect_every=None, evaluate_every=200, checkpoint_every=2000),
    ),
    learning_rates=(5e-4, 1e-3, 3e-3),
    seeds=4,
)
NOTES = (
    "The task is synthetic: words that belong to classes, drawn anew for each sequence, a share of the labels wrong. "
    "`diff-lab eval CHECKPOINT --measure many_shot --option folder=FOLDER` asks a language model about TREC, "
    "Banking-77 or CLINC-150.",
)

# Demonstrations have 20 to 40 tokens each, so the longest prompts have 20K to 40K.
PAPER_SHOTS = [16, 32, 64, 128, 256, 512, 1024]

FIG_6 = Experiment(
    name="fig6",
    shows="many-shot classification by the number of demonstrations and of wrong labels among them (Figure 6)",
    presets={
        "cpu": replace(
            MANY_SHOT_CPU,
            options={"shots": [6, 12, 24], "noises": [0.0, 0.1, 0.3], "episodes": 64, "queries": 32},
            minutes=65,
        ),
        "gpu": replace(
            MANY_SHOT_GPU,
            options={"shots": [64, 128, 256], "noises": [0.0, 0.1, 0.3], "episodes": 64, "queries": 64},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, LONG_CONTEXTS),
            evaluations=tuple(
                evaluation("many_shot", task=task, folder=f"your-{task}", shots=PAPER_SHOTS, queries=100)
                for task in ("trec", "trec-fine", "banking77", "clinc150")
            ),
            remarks=(
                "The paper shows more and more demonstrations until they fill 64K tokens. How many those are depends "
                "on the tokenizer, so the numbers of shots are ours, as is that of the questions; where a prompt is "
                "too long, the command says so before it measures.",
            ),
        ),
    },
    measurements="episodes",
    compare=compared_by(ComparisonRule(name=many_shot.ACCURACY)),
    # With as many demonstrations as there are, the fewest of them wrong.
    headline=lambda options: Headline(
        name=many_shot.ACCURACY,
        coordinates=Coordinates(noise=min(options["noises"]), shots=max(options["shots"])),
        claim=f"DIFF classifies by {max(options['shots'])} demonstrations better than the Transformer",
    ),
    notes=(
        *NOTES,
        "The paper gives mean gains of DIFF on other data: TREC 18.0, TREC-fine 21.6, Banking-77 10.4, Clinic-150 5.2 "
        "points.",
    ),
)

# The first is judged: how far apart orders lie beyond chance, without bias. A range grows with what chance does, which
# is most at one half, so that it would follow the accuracy; a spread is the root of the first, to be read. A model that
# guesses has no orders that are better than others, so both variants must be above guessing for a verdict.
RANGE, SPREAD = "many_shot/order_range", "many_shot/order_spread"
# Best less worst of 10 orders on TREC: DIFF, the Transformer.
PAPER = {"random": (0.040, 0.190), "alternating": (0.134, 0.567)}

FIG_7 = Experiment(
    name="fig7",
    shows="how much the answers depend on the order of the same demonstrations (Figure 7)",
    presets={
        "cpu": replace(
            MANY_SHOT_CPU,
            options={"shots": 24, "noises": [0.1, 0.3], "orders": 30, "queries": 200, "sets": 4},
            minutes=65,
        ),
        "gpu": replace(
            MANY_SHOT_GPU,
            options={"shots": 256, "noises": [0.1, 0.3], "orders": 30, "queries": 200, "sets": 8},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, LONG_CONTEXTS),
            evaluations=(
                evaluation("many_shot_orders", task="trec", folder="your-trec", shots=64, orders=10, queries=100),
            ),
            remarks=(
                "Ten orders of the same demonstrations, at random and with alternating classes, as in the paper. How "
                "many demonstrations and questions it has is ours to choose.",
            ),
        ),
    },
    measurements="episode_orders",
    compare=compared_by(
        ComparisonRule(name=many_shot.ORDER_VARIANCE),
        ComparisonRule(name=RANGE, paper=lambda coordinates: PAPER[str(coordinates["orders"])], claimed=False),
        ComparisonRule(name=SPREAD, claimed=False),
        ComparisonRule(name=many_shot.ORDER_MEAN, claimed=False),
    ),
    headline=lambda options: Headline(
        name=many_shot.ORDER_VARIANCE,
        coordinates=Coordinates(orders=many_shot.ORDERS[0], noise=options["noises"][0]),
        claim="DIFF's answers depend less on the order of demonstrations than the Transformer's",
    ),
    notes=(
        *NOTES,
        f"The verdict is on {many_shot.ORDER_VARIANCE}, the variance of the accuracies after different orders less "
        "what chance alone gives, as a mean over sets; where chance did less than usual it is below 0. "
        f"{SPREAD} is the mean over seeds of its root for each, 0 where it is below 0.",
        "A model that guesses answers alike after every order, and one that is hardly better nearly so: where the 95 % "
        f"interval of a variant's {many_shot.ORDER_MEAN} is not above guessing, the variances are not comparable. "
        "Beyond it the variance may still be smaller for the variant that knows less, or nearly all.",
        f"{RANGE} is the best less the worst of {many_shot.RANGE_ORDERS} orders, as in the paper. Most of it may "
        "be chance, which is largest where half of the answers are right: it follows the accuracy, so no verdict is on "
        "it.",
    ),
)
