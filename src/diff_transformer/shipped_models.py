"""Finds the trained models that come with the package, each a folder that transformers' ``from_pretrained`` loads."""

from pathlib import Path

from diff_transformer.utils.suggestions import did_you_mean

WEIGHTS = Path(__file__).resolve().parent / "weights"  # not there where the package was built without models
# Text that the tokenizer and the training have not seen, beside a model of text: what its numbers are measured on.
HELD_OUT = "held_out.jsonl"
# What a program needs of a model's card: an object of `diff_lab.record.CardRecord`.
CARD_RECORD = "card.json"
# What `diff-transformer generate` takes where no checkpoint is named.
LANGUAGE_MODEL = "novels-diff"


def pretrained_names() -> list[str]:
    """List the trained models that come with this package, sorted; none if it was built without them.

    Examples:
        >>> pretrained_names()
        ['needles-diff', 'needles-softmax', 'novels-diff', 'novels-softmax']
    """
    return sorted(file.parent.name for file in WEIGHTS.glob("[!.]*/config.json"))


def pretrained(name: str) -> str:
    """Return the folder of a trained model that comes with this package, such as "needles-diff".

    Returns:
        The path, for ``AutoModelForCausalLM.from_pretrained`` and whatever else loads a folder. Nothing is downloaded
        and nothing is written there. The folder's README.md is the model's card.

    Raises:
        ValueError: there is no model of that name. The message has the names there are.

    Examples:
        >>> model = transformers.AutoModelForCausalLM.from_pretrained(pretrained("needles-diff"))
        >>> model.config.attention_type
        'diff'
    """
    names = pretrained_names()
    if not names:
        raise ValueError(f"There is no model {name!r}: this copy of the package was built without trained models.")
    if name not in names:
        hint = did_you_mean(name, names)
        raise ValueError(f"The package has no model {name!r}, only {', '.join(names)}{hint}")
    return str(WEIGHTS / name)
