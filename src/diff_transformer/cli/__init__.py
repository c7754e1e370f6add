"""The command `diff-transformer`. Each command is a module of its own, imported when it is called."""

import logging
import sys
from collections.abc import Collection, Iterable
from importlib.util import find_spec

from diff_transformer import CHECKOUT

LARGEST_SEED = (1 << 63) - 1  # that torch's generators take
# What the extra [train] brings: name to import → name to install.
TRAIN_EXTRA = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "matplotlib": "matplotlib",
    "pydantic": "pydantic",
    "rich": "rich",
    "tensorboard": "tensorboard",
    "typer": "typer",
    "yaml": "pyyaml",
}
ONNX_EXTRA = {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"}
HARNESS_EXTRA = {"lm_eval": "lm-eval"}
EXTRAS = {"train": TRAIN_EXTRA, "onnx": ONNX_EXTRA, "harness": HARNESS_EXTRA}


def main() -> None:
    """Run the command line: exit code 0, or 2 after an error (one line on stderr), or 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a letter shows "?"; the text that a model writes may hold any letter.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    # transformers imports torchao wherever it is installed, and every command would begin with what it could not load.
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        from diff_transformer.cli.app import app

        app()
    except ModuleNotFoundError as error:
        advice = missing_extra(error)
        if advice is None:
            raise
        sys.stderr.write(f"error: {advice}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def refuse_repeated(settings: Iterable[str]) -> None:
    """Raise ValueError where KEY=VALUE is given twice for one key: only one of the values can have been meant."""
    given: dict[str, str] = {}
    for setting in settings:
        key = setting.partition("=")[0]
        if key in given:
            raise ValueError(f"{key!r} is set twice, by {given[key]!r} and by {setting!r}; give it once.")
        given[key] = setting


def require_extra(extra: str, without: Collection[str] = ()) -> None:
    """Raise ModuleNotFoundError where an extra is not all there: at once, and not after torch has been imported.

    Args:
        extra: one of `EXTRAS`.
        without: modules of it that are not needed.
    """
    for name in EXTRAS[extra]:
        if name not in without and find_spec(name) is None:
            raise ModuleNotFoundError(name=name)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install where an extra is missing; None if the module belongs to none."""
    name = (error.name or "").partition(".")[0]
    for extra, brings in EXTRAS.items():
        if name in brings:
            return f'This command needs {brings[name]}, which is not installed: pip install ".[{extra}]" {CHECKOUT}'
    return None
