"""Writes the code files of a saved model, and ``auto_map`` in its config.json, which names them.

Without an import of this package transformers does not know the model; with ``auto_map`` it says that
``trust_remote_code=True`` loads it. The files hold no model: they import this package, or name in one sentence the
package to install. So a folder never carries a copy of the code that grows old, and its classes are the package's own:
whatever is registered for them is found. Once the package is imported, nobody reads the files.
"""

from diff_transformer._version import INSTALL, __version__

_CONFIGURATION, _MODELING = "configuration_diff_transformer", "modeling_diff_transformer"

# transformers' Auto classes and this package's. `auto_map` in config.json names all but one: a language model is causal
# or masked.
AUTO_CLASSES = {
    "AutoConfig": "DiffTransformerConfig",
    "AutoModel": "DiffTransformerModel",
    "AutoModelForCausalLM": "DiffTransformerForCausalLM",
    "AutoModelForMaskedLM": "DiffTransformerForMaskedLM",
    "AutoModelForQuestionAnswering": "DiffTransformerForQuestionAnswering",
    "AutoModelForSequenceClassification": "DiffTransformerForSequenceClassification",
    "AutoModelForTokenClassification": "DiffTransformerForTokenClassification",
}

# transformers looks for imports in these files, and answers a missing package before it runs them, but not for imports
# in a `try`: so the user reads the sentence of these two.
_CONFIGURATION_TEXT = '''"""The configuration of this checkpoint. Its code is in the Python package diff-transformer.

After `import diff_transformer` transformers knows the model, and this file is not needed.
"""

import importlib

from packaging.version import Version

NEEDED = "{version}"
INSTALL = "{install}"

try:
    import diff_transformer
except ModuleNotFoundError as error:
    if error.name != "diff_transformer":
        raise
    raise ImportError(f"This model needs the package diff-transformer, which is not installed: {{INSTALL}}") from None
if Version(diff_transformer.__version__) < Version(NEEDED):
    raise ImportError(
        f"This model needs diff-transformer {{NEEDED}} or later, "
        f"but {{diff_transformer.__version__}} is installed: {{INSTALL}}"
    )

package = importlib.import_module("diff_transformer.model")
DiffTransformerConfig = package.DiffTransformerConfig
'''

_MODELING_TEXT = '''"""The models of this checkpoint. Their code is in the Python package diff-transformer."""

from .{configuration} import package

{classes}
'''


def auto_map(is_causal: bool = True) -> dict[str, str]:
    """Return ``auto_map`` of a configuration: Auto class → "file.class"."""
    other = "AutoModelForMaskedLM" if is_causal else "AutoModelForCausalLM"
    return {
        auto: f"{_CONFIGURATION if auto == 'AutoConfig' else _MODELING}.{name}"
        for auto, name in AUTO_CLASSES.items()
        if auto != other
    }


def code_files() -> dict[str, str]:
    """Return the code files by name. They ask for this version of the package or a later one."""
    models = [name for auto, name in AUTO_CLASSES.items() if auto != "AutoConfig"]
    classes = "\n".join(f"{name} = package.{name}" for name in models)
    return {
        f"{_CONFIGURATION}.py": _CONFIGURATION_TEXT.format(version=__version__, install=INSTALL),
        f"{_MODELING}.py": _MODELING_TEXT.format(configuration=_CONFIGURATION, classes=classes),
    }
