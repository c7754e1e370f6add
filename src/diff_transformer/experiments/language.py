"""What the experiments on text share: settings of their sizes, and records of a run.

The corpus is the source of Python's standard library unless the user names another (`--text`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_transformer.data import TextBatches
from diff_transformer.eval import language_loss
from diff_transformer.eval.documents import text_part
from diff_transformer.eval.repeats import check_repeats, repeat_records
from diff_transformer.experiments.framework import MeasuredRun
from diff_transformer.results import Result
from diff_transformer.train import Data

LOSS = "language/validation_loss"
# The same of whole documents; a column of Table 6.
WHOLE = "repeats/loss"
_AR_HIT = ("documents", "longest", "frequent")
FIXED_TEXT = "Intervals are over seeds on one fixed text, and say nothing of other text."

# Minutes on two cores: 2048 tokens to a step. The training sees a fraction of the corpus, so much of it is left to
# measure on: intervals over documents want many. First weights of 0.1 give so narrow a model activations of the scale
# that 0.02 gives one 1600 wide; from 0.02 both twins start slowly, DIFF most of all (docs/log.md).
CPU = (
    "data.tokenizer=bpe",
    "data.vocab_size=1024",
    "data.length=128",
    "data.batch_size=16",
    "data.isolate_documents=false",
    "data.validation_fraction=0.2",
    "data.validation_tokens=20000",
    "model.tie_word_embeddings=true",
    "model.initializer_range=0.1",
    "train.log_every=20",
    "train.inspect_every=null",
    "train.checkpoint_every=200",
)
# One H200: 8 layers of 512, 16 heads of 32 in the Transformer and 8 in DIFF, 32,768 tokens to a step. The standard
# library is seen many times over by then: it was planned for a folder of novels (--text).
GPU = (
    "data.tokenizer=bpe",
    "data.vocab_size=8192",
    "data.length=1024",
    "data.batch_size=32",
    "data.validation_fraction=0.2",
    "data.validation_tokens=500000",
    "model.hidden_size=512",
    "model.intermediate_size=1376",
    "model.num_hidden_layers=8",
    "model.head_dim=32",
    "train.precision=bf16",
    "train.warmup_steps=100",
    "train.log_every=50",
    "train.inspect_every=null",
    "train.checkpoint_every=1000",
)


def text_of(run: MeasuredRun) -> TextBatches:
    """The run's data, which is text."""
    assert isinstance(run.data.batches, TextBatches)  # the recipes of these experiments
    return run.data.batches


def loss_record(run: MeasuredRun) -> Result:
    """The validation loss of a run, in the arm's group."""
    loss = language_loss(run.model, text_of(run))
    shared: dict[str, Any] = {"arm": run.arm.name, "group": run.arm.group, "seed": run.seed}
    return Result(name=LOSS, value=loss.per_token, n=loss.targets, unit="nats/token", better="lower", **shared)


def ar_hit_records(run: MeasuredRun, options: Any) -> list[Result]:
    """Table 6's columns on text, in the arm's group; `options` has "documents", "longest" and "frequent"."""
    settings = {name: options[name] for name in _AR_HIT}
    return repeat_records(run.model, text_of(run), run.arm.name, seed=run.seed, group=run.arm.group, **settings)


def check_ar_hit(options: Mapping[str, Any], data: Data) -> None:
    """Raises where `ar_hit_records` would, whatever the model."""
    check_repeats(text_part(data.batches), **{name: options[name] for name in _AR_HIT})


def by_name(records: Sequence[Result], name: str) -> list[Result]:
    """The records of a measure."""
    return [record for record in records if record.name == name]
