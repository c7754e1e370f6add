"""How many heads an arm has, as the paper counts them."""

from dataclasses import dataclass

from diff_transformer.train import Recipe, build_config
from diff_transformer.train.flops import head_dim


@dataclass(frozen=True)
class Heads:
    """The heads of a layer.

    Attributes:
        count: how many; those of DIFF have two maps each, and are half as many as its twin's.
        width: of a query, d. DIFF's values are twice as wide.
        differential: whether they are DIFF's.
    """

    count: int
    width: int
    differential: bool

    def settings(self) -> dict[str, int]:
        """As an arm's entry in results has them."""
        return {"heads": self.count, "head_dim": self.width, "differential": self.differential}


def heads_of(recipe: Recipe) -> Heads:
    """The heads of a recipe's model."""
    config = build_config(recipe, vocab_size=1)
    # DIFF pairs its twin's heads; V2 has as many as its twin, with twice the queries.
    pairs = config.attention_type == "diff"
    count = config.num_attention_heads // 2 if pairs else config.num_attention_heads
    return Heads(count, head_dim(config), config.attention_type in ("diff", "diff_v2"))
