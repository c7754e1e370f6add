"""YAML as people mean it: 2e-3 is a number, `no` is a word, and a key given twice is an error."""

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where 2e-3 is a string and `no` is false; this one follows YAML 1.2 in both."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_FLOAT = "tag:yaml.org,2002:float"
_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT, _BOOL)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
               r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)  # fmt: skip


def read_yaml(text: str) -> Any:
    """Parse one YAML document.

    Raises:
        yaml.YAMLError: the text is not YAML, gives a key twice, or holds what Python cannot: lists in lists too deep, a
            number of thousands of digits, a list as a key.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("it holds lists in lists too deep") from None
    except (ValueError, TypeError) as error:
        raise yaml.YAMLError(str(error)) from None
