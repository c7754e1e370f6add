# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reproduce the paper
#
# The paper trains models of billions of parameters on a trillion tokens. What can two processor cores say about its
# claims? Less than the paper, but not nothing: does the claim hold *at this size*, how sure is that, and is it a
# question that such small models can answer at all? This page makes one verdict by hand, shows the two ways in which a
# verdict can be taken back, and then reads all of them.
#
# Nothing is trained here. The numbers come from the results in the repository, which `diff-lab reproduce`
# measured and wrote.
#
# *Ten minutes to read, half a minute to run. You need a checkout, and in it `pip install . ./lab`.*

# %% tags=["parameters"]
RESULTS = "../../lab/results"  # of the checkout
DRAWS = 2000  # of experiments without a difference

# %%
# %config InlineBackend.figure_formats = ["svg"]
import math
import statistics
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from diff_lab.experiments.request import as_defined
from diff_lab.learning import LAST_PART, MOST_ACCURACY, curves_of
from diff_lab.record import Comparison
from diff_lab.results_files import read_results
from diff_lab.statistics import mean_interval, seeds_needed, verdict

# Grey on a transparent ground can be read on a light page and on a dark one.
GREY, COLOURS = "#8b949e", {"diff": "#2f7fd1", "softmax": "#e0533d"}
plt.rcParams.update({f"{part}.color": GREY for part in ("text", "xtick", "ytick")})
plt.rcParams.update({f"axes.{part}": GREY for part in ("edgecolor", "labelcolor", "titlecolor")})
plt.rcParams.update({f"{part}.facecolor": "none" for part in ("figure", "axes", "savefig", "legend")})

# Of `low_bit`, which has results of two kinds of model, those of language.
paths = [path for size in ("cpu", "night_models") for path in sorted(Path(RESULTS, size).glob("*.json"))]
results = {path.stem: as_defined(read_results(path)) for path in paths}
print(f"{len(results)} experiments, {sum(len(file.comparisons) for file in results.values())} comparisons")

# %% [markdown]
# ## One verdict by hand
#
# Figure 6 of the paper: after many demonstrations in the prompt, DIFF classifies better. Our small version is a
# synthetic task: words are dealt out to classes anew for each sequence, an item is two words of one class, some labels
# are wrong, and the model is asked for the class of an item that it most likely has not seen, though it has seen its
# words. The comparison that stands for the experiment:

# %%
file = results["fig6"]
row = next(row for row in file.comparisons if file.headline.names(row))
print(file.headline.claim)
print(f"after {row.steps} steps: DIFF {row.ours[0]:.3f}, Transformer {row.ours[1]:.3f}")
print("DIFF − Transformer, seed by seed:", ", ".join(f"{d:+.3f}" for d in row.differences))

# %% [markdown]
# The same seed gives both models the same data in the same order, and the same first numbers wherever they have the
# same parameters. So differences are taken seed by seed. Other seeds would have given other differences; Student's t
# says how far the mean of all seeds may lie from the mean of these.

# %%
n = len(row.differences)
mean, spread = statistics.fmean(row.differences), statistics.stdev(row.differences)
half = stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n)
print(f"{n} seeds: {mean:+.4f} ± {half:.4f}, so 95 % of [{mean - half:+.4f}, {mean + half:+.4f}]")
print(f"in the file: {row.interval}, by {row.method}")
assert np.allclose(row.interval, (mean - half, mean + half))

# %% [markdown]
# Where documents are measured on, other documents would have given other losses, too. A bootstrap over the documents
# makes the interval wider then.
#
# The rule is one line: all of the interval on the claim's side of 0 is "reproduced", all of it on the other side
# "contrary", else "inconclusive".

# %%
assert verdict(row.interval, "higher", seeds=n) == row.verdict
print("verdict:", row.verdict)

# %% [markdown]
# How often does this rule see something where there is nothing? We draw experiments in which both models are equally
# good, and judge them.

# %%
random = np.random.default_rng(0)
drawn = [mean_interval(random.normal(0, spread, n).tolist()) for _ in range(DRAWS)]
counted = Counter(verdict(interval, "higher", seeds=n) for interval in drawn)
print({name: f"{count / DRAWS:.1%}" for name, count in counted.items()})
assert counted["reproduced"] + counted["contrary"] < 0.1 * DRAWS

# %% [markdown]
# About one in twenty, half of it on each side. We have far more comparisons than twenty, and none is corrected for
# that. So a single verdict that fits no pattern is worth little.
#
# An inconclusive verdict says how many seeds would have decided it, in four experiments of five, if the true
# difference were the one that was seen:

# %%
for name, other in ((name, row) for name, file in results.items() for row in file.comparisons):
    if other.verdict == "inconclusive" and other.seeds_needed and results[name].headline.names(other):
        print(f"{name}: {other.name}, {len(other.differences)} seeds so far, {other.seeds_needed} needed")
        if not other.documents_needed and "documents" not in other.method:
            assert seeds_needed(other.differences) == other.seeds_needed

# %% [markdown]
# ## Taken back, first: who has not begun
#
# A model that guesses says nothing about an architecture. Beside each accuracy stands what a model reaches that has
# not learned the task: by guessing, by knowing which answers occur but not where they belong (the *floor*), and by
# leaving out those already given (*elimination*). A comparison in which one of the two is not shown to be above all of
# these is "not comparable", however clear the interval is.
#
# All of our trainings have got beyond that. So here is one as it stood early, looking for answers among distractors of
# the same form, and what became of it:

# %%
file = results["noise"]
at_step: dict[int, dict[str, list[float]]] = {}
for step in (100, 500, 5000):
    at_step[step] = {one.variant: [c.at(step) for c in one.by_seed.values()] for one in curves_of(file.records)}
    for variant in ("diff", "softmax"):
        low, high = mean_interval(at_step[step][variant])
        mean = statistics.fmean(at_step[step][variant])
        print(f"step {step:5,}, {variant:8} {mean:.3f} [{low:.3f}, {high:.3f}]")
    pairs = zip(at_step[step]["diff"], at_step[step]["softmax"], strict=True)
    low, high = mean_interval([one - other for one, other in pairs])
    print(f"difference after {step:,} steps: [{low:+.3f}, {high:+.3f}]")
assert mean_interval(at_step[500]["softmax"])[0] < statistics.fmean(at_step[100]["softmax"])
assert mean_interval(at_step[500]["diff"])[0] > mean_interval(at_step[100]["diff"])[1]
row = next(one for one in file.comparisons if file.headline.names(one))
print(f"in the end: {row.verdict}, {row.ours[0]:.3f} and {row.ours[1]:.3f}")
assert row.verdict == "reproduced"

# %% [markdown]
# Whoever had stopped after 500 steps would have had an interval on DIFF's side of 0, over eight seeds, of a Transformer
# that had not begun: it answers no better than after 100. Only since both find answers does the difference say
# something, and here it stays.

# %% [markdown]
# ## Remarked: who has not finished
#
# A result at the end of a fixed number of steps is about a moment. Here are the validation curves of the same models,
# a line for each seed:

# %%
figure, ax = plt.subplots(figsize=(5.5, 3), layout="constrained")
for variant in curves_of(file.records):
    for number, curve in enumerate(variant.by_seed.values()):
        label = {"diff": "DIFF", "softmax": "Transformer"}.get(variant.variant) if number == 0 else None
        if variant.variant in COLOURS:
            ax.plot(curve.steps, curve.values, color=COLOURS[variant.variant], label=label, linewidth=1)
ax.set(xlabel="training step", ylabel="validation accuracy")
ax.legend(frameon=False, loc="lower right")
for variant in curves_of(file.records):
    if variant.is_still_training:
        print(variant.variant, "was still training")

# %% [markdown]
# Three seeds of DIFF are far above all others, and three of the Transformer far below: that is why the interval is
# wide. Whoever stops early gets other numbers:

# %%
end = max(curve.steps[-1] for variant in curves_of(file.records) for curve in variant.by_seed.values())
means: dict[str, list[float]] = {}
for variant in curves_of(file.records):
    at = [statistics.fmean(c.at(share * end) for c in variant.by_seed.values()) for share in (0.1, 0.2, 1)]
    means[variant.variant] = at
    print(
        f"{variant.variant:8}",
        "   ".join(f"{s:4.0%} of the steps: {a:.3f}" for s, a in zip((0.1, 0.2, 1), at, strict=True)),
    )
assert all(one > other for one, other in zip(means["diff"], means["softmax"], strict=True))
assert {"diff", "softmax"} <= {one.variant for one in curves_of(file.records) if one.is_still_training}

# %% [markdown]
# DIFF is ahead at each of them, and yet nobody knows of the end: both models went on learning to the last step. So
# beside a difference of quality stands who was *still training*: whom the last part of the training still
# gave more than a fixed amount. It is a remark: the verdict is that of the interval.

# %%
print(f"the limit: {MOST_ACCURACY} of accuracy over the last {LAST_PART:.0%} of the training")

# %% [markdown]
# ## What came out
#
# One comparison stands for each experiment; its definition named it, not its outcome.


# %%
def headline(name: str) -> Comparison | None:
    file = results[name]
    return next((row for row in file.comparisons if file.headline and file.headline.names(row)), None)


by_verdict: dict[str, list[str]] = {}
for name in results:
    row = headline(name)
    if row is not None and row.verdict is not None:
        low, high = row.interval
        line = f"{name:22} {row.ours[0]:7.3f} {row.ours[1]:7.3f}   [{low:+.4f}, {high:+.4f}]"
        by_verdict.setdefault(row.verdict, []).append(line + ("   (our own question)" if row.exploratory else ""))
for said, lines in by_verdict.items():
    print(f"{said}\n  " + "\n  ".join(lines))
came_out = {name: row.verdict for name in results if (row := headline(name)) is not None}
assert {name for name in came_out if came_out[name] == "reproduced"} == {"noise", "v2"}
assert {name for name in came_out if came_out[name] == "contrary"} == {"appendix_c", "fig3", "low_bit", "table6"}

# %% [markdown]
# Read with the sizes in mind. The smallest and the largest model of all these experiments:

# %%
sizes = [record.value for file in results.values() for record in file.records if record.name == "training/parameters"]
print(f"{min(sizes):,.0f} to {max(sizes):,.0f} parameters; the paper's have 830 million to 13 billion")
print("measured on:", ", ".join(sorted({file.device for file in results.values()})))
assert max(sizes) < 2e6

# %% [markdown]
# Of experiments that are not in the list no one comparison stands for the whole: what some measure needs a model that a
# small one says nothing about, so there only the protocol runs from end to end (the questions of
# lm-evaluation-harness, a judge of hallucinations).
#
# ## Do it yourself
#
#     diff-lab reproduce --list                                        # all experiments, and how long they take
#     diff-lab reproduce v2                                            # one of them, on two cores
#     diff-lab reproduce language --preset evening --text my-novels    # longer trainings, on text of yours
#
# Any of them ends with the table of its comparisons, and a report, `RESULTS.md`. A run that was interrupted
# resumes with `--resume`.
#
# ## What we have found
#
# - A verdict is an interval and a line of arithmetic; where two models are equal, it errs about once in twenty times.
# - It is taken back where one of the two models is at chance, and has a remark where one has not finished.
# - At our sizes DIFF answers more questions among distractors. It works out fewer sums, needs more parameters for the
#   same loss on text, and has a higher loss early in training. None of these four survives a correction for the number
#   of comparisons that they were picked from; DIFF V2's lower loss after .4 million tokens does. The others are
#   inconclusive.
# - All of this is about models a thousandth of the size of the paper's smallest, and less. It does not contradict the
#   paper; it says what can be expected of small models, and which questions a small budget answers.
