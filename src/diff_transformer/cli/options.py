"""Settings on the command line: NAME=VALUE."""

from typing import Any

import yaml

from diff_transformer.train.yaml_reader import read_yaml


def parse_options(given: list[str]) -> dict[str, Any]:
    """Names and values; a value is YAML: a number, a word, a list.

    Raises:
        ValueError: one that is not NAME=VALUE, or a name given twice.
    """
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{text!r} is not a setting; write NAME=VALUE.")
        if name in options:
            raise ValueError(f"The option {name!r} is given twice.")
        try:
            options[name] = read_yaml(value)
        except yaml.YAMLError:
            raise ValueError(f"The value of {text!r} is not valid YAML.") from None
    return options
