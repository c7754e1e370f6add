"""Finds out which optional dependencies of the package are missing, and says how to install them."""

from collections.abc import Collection
from importlib.util import find_spec

from diff_transformer._version import CHECKOUT

# The packages of the extra [train]: the name to import → the name to install.
TRAIN_EXTRA = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "pydantic": "pydantic",
    "rich": "rich",
    "scipy": "scipy",
    "tensorboard": "tensorboard",
    "typer": "typer",
    "yaml": "pyyaml",
}
ONNX_EXTRA = {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"}
HARNESS_EXTRA = {"lm_eval": "lm-eval"}
EXPLORE_EXTRA = {"starlette": "starlette", "uvicorn": "uvicorn", "anywidget": "anywidget"}
# The packages of the extra [serve], which is enough for `serve` without [train].
SERVE_EXTRA = {
    "jinja2": "jinja2",
    "rich": "rich",
    "starlette": "starlette",
    "typer": "typer",
    "uvicorn": "uvicorn",
}
EXTRAS = {
    "train": TRAIN_EXTRA,
    "onnx": ONNX_EXTRA,
    "harness": HARNESS_EXTRA,
    "explore": EXPLORE_EXTRA,
    "serve": SERVE_EXTRA,
}

# Commands that train in their own process, or may. Their files are what they make, and stdout only tells of it.
TRAINING = ("demo", "train", "reproduce", "compare")


class MissingExtraError(ModuleNotFoundError):
    """A module is missing that a command's own extra brings; another extra may bring it too."""

    def __init__(self, name: str, extra: str) -> None:
        super().__init__(name=name)
        self.extra = extra


def require_extra(extra: str, without: Collection[str] = ()) -> None:
    """Raise MissingExtraError where a module of an extra, except `without`, is missing, before torch is imported."""
    for name in EXTRAS[extra]:
        if name not in without and find_spec(name) is None:
            raise MissingExtraError(name, extra)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install where a package of an extra is missing; None if the module belongs to no extra."""
    name = (error.name or "").partition(".")[0]
    for extra, brings in EXTRAS.items():
        if name in brings and extra == getattr(error, "extra", extra):
            return f'This command needs {brings[name]}, which is not installed: pip install ".[{extra}]" {CHECKOUT}'
    return None
