"""What a recipe may say of the model and of training. Every key is checked: its name, its type and its range."""

from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from diff_transformer.variants import ATTENTION_TYPES

# Of whole numbers that tensors and generators of random numbers take.
LARGEST_INTEGER = (1 << 63) - 1
Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _trainable(attention_type: str) -> str:
    """Accept the attention types that are trained from the start; a corrected one starts as a trained model."""
    allowed = [name for name, described in ATTENTION_TYPES.items() if not described.corrects_heads]
    if attention_type not in allowed:
        choices = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise PydanticCustomError("literal_error", "Input should be {choices}", {"choices": choices})
    return attention_type


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no conversions ("3" is not 3), no changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelRecipe(Section):
    """The model; the names are those of `DiffTransformerConfig`. A DIFF Transformer and
    its baseline differ in `attention_type` alone.

    `headwise_norm` left out is as the attention type has it; true or false are ablations.
    `num_attention_heads` is the Transformer's count; left out, it is hidden_size / head_dim.
    `max_position_embeddings` left out is the length of the training sequences. `vocab_size` pads the vocabulary: it is
    the tokenizer's or more. `init_from` (`start_from` in older recipes) is the folder of a model with the same
    sizes, whose weights are the first ones; rope_theta and max_position_embeddings are this recipe's.
    """

    attention_type: Annotated[str, AfterValidator(_trainable)] = "diff"
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
    init_from: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, validation_alias=AliasChoices("init_from", "start_from")
    )

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
        """The Transformer's attention heads."""
        if self.num_attention_heads is not None:
            return self.num_attention_heads
        assert self.head_dim is not None  # _heads_are_known
        return self.hidden_size // self.head_dim


class TrainRecipe(Section):
    """How to train. Units: steps are optimizer steps; `learning_rate` is the highest one, after warm-up.

    `final_learning_rate` is the fraction of it that is left at the end. `decay_steps` belongs to the schedule
    "warmup_stable_decay". The optimizer "muon" takes the matrices inside the layers, with `momentum`; AdamW takes
    the rest, with `betas` and `eps`. Weight decay applies to matrices, but not to embeddings and λ.
    `accumulation` splits the batch of a step into so many parts, one after the other: less memory, the same result.
    `max_grad_norm` null does not clip. `log_every`, `evaluate_every`, `inspect_every` (numbers of each layer, by a
    forward pass over one sequence) and `checkpoint_every` count steps; the last step is always logged and evaluated.
    `parallel` says what several processes do: "ddp" (all weights on each), "fsdp" (weights sharded), "tensor" (heads
    divided), or "auto", which is what the launcher asks for, else "ddp". `compile` compiles each layer.
    Where the loss is not finite, or more than `max_loss_rise` nats (and than its usual jumps) above what it was, from
    the 21st step on, `on_divergence` "stop" ends the run with a report and "skip" skips the step.
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
