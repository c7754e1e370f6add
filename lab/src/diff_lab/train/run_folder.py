"""Decides which run may write into an output folder, and deletes the files of an overwritten run."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from diff_lab.train.recipe import Recipe, differences, dump_recipe, load_recipe
from diff_lab.train.run_setup import EXAMPLES, check_init_from
from diff_transformer.utils.files import present_folders, unfinished_path, write_atomically

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
MODEL = "model"
LOCK = ".lock"
# What a run writes, of earlier versions too; the recipe is deleted last, as it marks the folder as ours.
_UNFINISHED = (".unfinished-start", f".unfinished-{MODEL}", f".replaced-{MODEL}")
_OURS = (*_UNFINISHED, METRICS, TENSORBOARD, CHECKPOINTS, MODEL, "divergence.json", EXAMPLES, RECIPE)
_BEGUN = {unfinished_path(Path(RECIPE)).name, LOCK}  # all that a run leaves that was killed when it began
_NAMED = 4  # how many differing settings a message names
# Settings that no number of a run depends on, and where its text lies: the text itself is known by what it says.
WITHOUT_EFFECT = (
    "data.cache",
    "data.paths",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.timeout_minutes",
)
# Settings that a resumed run may change: also what is done about bad steps, from here on.
_CHANGEABLE = (*WITHOUT_EFFECT, "train.max_loss_rise", "train.on_divergence")
_HEADING = "# A training run of diff-transformer, every setting spelled out.\n"

# "auto": where there is a run.
Resume = bool | Literal["auto"]


def check_run_folder(folder: Path, recipe: Recipe, *, resume: Resume, overwrite: bool) -> bool:
    """Check that a run of `recipe` may have `folder` and can start from the model it names. Changes nothing.

    Returns whether a run in the folder is resumed rather than begun. Raises ValueError, FileNotFoundError or
    FileExistsError, whose message names the way out.
    """
    if resume and overwrite:
        raise ValueError("A run is either resumed or overwritten, not both.")
    if resume not in (True, False, "auto"):
        raise ValueError(f"resume must be True, False or 'auto', got {resume!r}.")
    is_run = is_run_folder(folder)
    if resume and resume != "auto" and not is_run:
        raise FileNotFoundError(f"There is no run to resume in {str(folder)!r}.")
    if resume and is_run:
        changed = differences(load_recipe(folder / RECIPE), recipe)
        changed = [text for text in changed if text.partition(" ")[0] not in _CHANGEABLE]
        if changed:
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise ValueError(
                f"The run in {str(folder)!r} was started with another recipe; (then, now) differ in: "
                f"{', '.join(changed[:_NAMED])}{more}; choose another --output (in Python output_dir), which may begin "
                "with this run's weights (model.init_from), or replace it with --overwrite (overwrite=True)."
            )
        if (folder / MODEL).is_dir() and not present_folders(folder / CHECKPOINTS, "*"):
            raise FileExistsError(
                f"The run in {str(folder)!r} is finished and has no checkpoints any more to resume from: its model "
                f"is in {str(folder / MODEL)!r}, and --overwrite (overwrite=True) trains it anew."
            )
        return True
    if is_run and not overwrite:
        raise FileExistsError(
            f"The output folder {str(folder)!r} already holds a run; "
            "choose another --output (in Python output_dir), resume it with --resume (resume=True), or replace it with "
            "--overwrite (overwrite=True)."
        )
    if not is_run and folder.exists() and not (folder.is_dir() and {p.name for p in folder.iterdir()} <= _BEGUN):
        raise FileExistsError(f"{str(folder)!r} exists and is not a run of ours, so nothing is written there.")
    start = check_init_from(recipe)
    if is_run and start is not None and start.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"model.init_from {str(start)!r} lies in the run that --overwrite (overwrite=True) would replace, and "
            "would be deleted with it; choose another --output (in Python output_dir)."
        )
    return False


def begin_run_folder(folder: Path, recipe: Recipe) -> None:
    """Prepare `folder`, which `check_run_folder` has allowed, for a new run of `recipe`.

    Overwriting deletes the files of a run and nothing else, and only if a run has written `recipe.yaml`.
    """
    if is_run_folder(folder):
        for path in (folder / name for name in _OURS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECIPE, _HEADING + dump_recipe(recipe))  # half a recipe would mark no folder as ours


def continue_run_folder(folder: Path, recipe: Recipe) -> None:
    """Prepare the folder of a run for being resumed: its recipe has the settings that the rest is trained with."""
    if differences(load_recipe(folder / RECIPE), recipe):
        write_atomically(folder / RECIPE, _HEADING + dump_recipe(recipe))


def require_run_folder(folder: Path) -> None:
    """Raise FileNotFoundError if the folder of a running training has been removed or moved away."""
    if not folder.is_dir():
        raise FileNotFoundError(f"The output folder {str(folder)!r} was removed during training.")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process from training in `folder` until the block, or this process, ends.

    Raises ValueError if another one trains there now. Folders that are made for the lock and stay empty are removed.
    """
    created = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"Another process trains in {str(folder)!r} now: wait for it, or end it.") from None
    except NotImplementedError:  # a file system without locks
        yield
        return
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        for path in created:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def is_run_folder(folder: Path) -> bool:
    """Return whether a training run has written this folder."""
    recipe = folder / RECIPE
    return recipe.is_file() and recipe.read_text(encoding="utf-8-sig", errors="replace").startswith(_HEADING)
