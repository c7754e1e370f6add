"""What a recipe may say. Every key is checked: its name, its type and its range."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# Of whole numbers that tensors and generators of random numbers take.
LARGEST_INTEGER = (1 << 63) - 1
Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no conversions ("3" is not 3), no changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelRecipe(Section):
    """The model; the names are those of `DiffTransformerConfig`. Twins differ in `attention_type` alone.

    `headwise_norm` left out is as the attention type has it; true or false are ablations.
    `num_attention_heads` is the twin Transformer's count; left out, it is hidden_size / head_dim.
    `max_position_embeddings` left out is the length of the training sequences. `vocab_size` pads the vocabulary: it is
    the tokenizer's or more. `start_from` is the folder of a model with the same sizes, whose weights are the first
    ones; rope_theta and max_position_embeddings are this recipe's.
    """

    attention_type: Literal["diff", "diff_v2", "softmax"] = "diff"
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    lambda_init: Literal["schedule"] | float = "schedule"
    headwise_norm: bool | None = None
    vocab_size: Count | None = None
    max_position_embeddings: Count | None = None
    rope_theta: Positive = 10000.0
    rms_norm_eps: Positive = 1e-5
    initializer_range: Positive = 0.02
    tie_word_embeddings: bool = False
    start_from: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _heads_are_known(self) -> "ModelRecipe":
        if self.num_attention_heads is None and self.head_dim is None:
            raise ValueError("give head_dim or num_attention_heads")
        if self.num_attention_heads is None and self.head_dim is not None and self.hidden_size % self.head_dim:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of head_dim={self.head_dim}, "
                "so num_attention_heads must be given"
            )
        return self

    @property
    def heads(self) -> int:
        """The twin Transformer's attention heads."""
        if self.num_attention_heads is not None:
            return self.num_attention_heads
        assert self.head_dim is not None  # _heads_are_known
        return self.hidden_size // self.head_dim


class TextData(Section):
    """Language modelling of real text; see `diff_transformer.data.batches.TextBatches`.

    The text is files and folders (`paths`), a data set of the `datasets` library (`dataset`, with `dataset_config` and
    `dataset_split`), or, where neither is given, the source of Python's standard library. `tokenizer` is "bytes",
    "bpe" (trained on the training documents, with `vocab_size` tokens), or a tokenizer's folder or name on the Hub.
    `batch_size` is the number of sequences of one optimizer step. `isolate_documents` false lets a document see those
    that stand before it in its sequence. Tokens are kept in `cache`, or in the user's cache folder.
    """

    kind: Literal["text"] = "text"
    paths: list[str] | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_field: str = "text"
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    vocab_size: Annotated[int, Field(gt=257, le=LARGEST_INTEGER)] | None = None
    length: Annotated[int, Field(ge=2, le=LARGEST_INTEGER)]
    batch_size: BatchSize
    isolate_documents: bool = True
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    validation_tokens: Count | None = 100_000
    cache: str | None = None

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> "TextData":
        if (self.tokenizer == "bpe") != (self.vocab_size is not None):
            raise ValueError('vocab_size is given with tokenizer "bpe", and only then')
        if self.paths is not None and self.dataset is not None:
            raise ValueError("the text is either in paths or in a dataset, not in both")
        return self


class RetrievalData(Section):
    """Multi-needle retrieval among noise tokens; see `diff_transformer.data.retrieval.RetrievalBatches`."""

    kind: Literal["retrieval"] = "retrieval"
    num_pairs: Count = 4
    length: Count = 128
    num_queries: Count | None = None
    repeats: bool = False
    vary: bool = False
    batch_size: BatchSize = 32
    num_keys: Count = 64
    num_values: Count = 64
    num_noise: Count = 128
    validation_sequences: Count = 1024


class NeedleData(TextData):
    """Text and, among it, documents with needles; see `diff_transformer.data.needle_batches.NeedleBatches`.

    Every key of text has its meaning. `share` of the sequences of a step, one or more, are needle documents, whose
    haystacks are the text's own.
    """

    kind: Literal["needles"] = "needles"  # type: ignore[assignment]  # what tells it from text
    share: Annotated[float, Field(gt=0, le=1)] = 0.2
    needles: Count = 4
    queried: Count = 2
    digits: Annotated[int, Field(ge=1, le=18)] = 7
    turns: Count = 1
    validation_documents: Count = 128

    @property
    def documents(self) -> int:
        """Needle documents in the batch of a step."""
        return max(1, round(self.share * self.batch_size))


class ManyShotData(Section):
    """Words of classes shown with labels; see `diff_transformer.data.many_shot.ManyShotBatches`."""

    kind: Literal["many_shot"] = "many_shot"
    shots: Count = 48
    classes: Annotated[int, Field(ge=2, le=LARGEST_INTEGER)] = 6
    labels: Count = 32
    words: Count = 36
    item_length: Count = 2
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.1
    vary: bool = False
    batch_size: BatchSize = 32
    validation_sequences: Count = 512

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.shots * (self.item_length + 1)


class ArithmeticData(Section):
    """Sums worked out step by step, as text; see `diff_transformer.data.arithmetic.ArithmeticBatches`."""

    kind: Literal["arithmetic"] = "arithmetic"
    operations: Count = 4
    length: Count = 48
    batch_size: BatchSize = 64
    largest: Count = 9
    validation_problems: Count = 512


class TrainRecipe(Section):
    """How to train. Units: steps are optimizer steps; `learning_rate` is the highest one, after warm-up.

    `final_learning_rate` is the fraction of it that is left at the end. `decay_steps` belongs to the schedule
    "warmup_stable_decay". The optimizer "muon" takes the matrices inside the layers, with `momentum`; AdamW takes
    the rest, with `betas` and `eps`. Weight decay applies to matrices, but not to embeddings and λ.
    `accumulation` splits the batch of a step into so many parts, one after the other: less memory, the same result.
    `max_grad_norm` null does not clip. `log_every`, `evaluate_every`, `inspect_every` (numbers of each layer, by a
    forward pass over one sequence) and `checkpoint_every` count steps; the last step is always logged and evaluated.
    `parallel` says what several processes do: "ddp" (the weights whole on each), "fsdp" (sharded), "tensor" (heads
    shared out), or "auto", which is what the launcher asks for, else "ddp". `compile` compiles each layer.
    Where the loss is not finite, or more than `max_loss_rise` nats (and than its usual jumps) above what it was, from
    the 21st step on, `on_divergence` "stop" ends the run with a report and "skip" leaves that batch out.
    `timeout_minutes` is how long a process waits for the others, and how long a step of several may take: then one of
    them hangs, and all end.
    """

    steps: Count
    learning_rate: Positive
    schedule: Literal["linear", "cosine", "warmup_stable_decay", "constant"] = "linear"
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST_INTEGER)] = 0
    decay_steps: Count | None = None
    final_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    optimizer: Literal["adamw", "muon"] = "adamw"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_grad_norm: Positive | None = 1.0
    accumulation: Count = 1
    precision: Literal["no", "bf16", "fp16"] = "no"
    device: Literal["auto", "cpu"] = "auto"
    parallel: Literal["auto", "ddp", "fsdp", "tensor"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    on_divergence: Literal["stop", "skip"] = "stop"
    max_loss_rise: Positive | None = 2.0
    seed: Annotated[int, Field(ge=0, le=LARGEST_INTEGER)] = 0
    log_every: Count = 10
    evaluate_every: Count | None = None
    inspect_every: Count | None = 100
    checkpoint_every: Count | None = None
    keep_checkpoints: Count = 2
    timeout_minutes: Annotated[float, Field(gt=0, le=10080)] = 30.0

    @model_validator(mode="after")
    def _decay_belongs_to_its_schedule(self) -> "TrainRecipe":
        if (self.schedule == "warmup_stable_decay") != (self.decay_steps is not None):
            raise ValueError('decay_steps is given with schedule "warmup_stable_decay", and only then')
        return self


class Recipe(Section):
    """A whole training run."""

    name: Annotated[str, Field(min_length=1)]
    model: ModelRecipe
    data: Annotated[TextData | NeedleData | RetrievalData | ManyShotData | ArithmeticData, Field(discriminator="kind")]
    train: TrainRecipe

    @model_validator(mode="after")
    def _parts_fit(self) -> "Recipe":
        if self.data.batch_size % self.train.accumulation:
            raise ValueError(
                f"train.accumulation={self.train.accumulation} does not divide data.batch_size={self.data.batch_size}"
            )
        positions = self.model.max_position_embeddings
        if positions is not None and positions < self.data.length:
            raise ValueError(
                f"model.max_position_embeddings={positions} is shorter than data.length={self.data.length}"
            )
        return self
