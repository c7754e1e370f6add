"""Trains a recipe with torchtitan, whose own flags follow `--`.

torchrun --nproc-per-node 8 -m diff_lab.titan paper-3b 'data.paths=[text]' -- --parallelism.tensor-parallel-degree 2
"""

import dataclasses
import sys
from pathlib import Path

import torch.distributed as dist
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry
from torchtitan.tools.logging import init_logger

from diff_lab.data import TextBatches
from diff_lab.measure.standard import validation_callback
from diff_lab.titan.trainer import trainer_config
from diff_lab.train import TrainingInterrupted
from diff_lab.train.recipe import load_recipe
from diff_lab.train.run_setup import build_data
from diff_lab.train.step import DivergenceError


def main(arguments: list[str]) -> None:
    """Run `RECIPE [KEY=VALUE …] [--output=FOLDER] [-- FLAGS]`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, flags = arguments[:end], arguments[end + 1 :]
    if not own or own[0].startswith("-"):
        sys.exit("The first argument must be a recipe, as of `diff-lab train`; torchtitan's flags follow after `--`.")
    outputs = [word.removeprefix("--output=") for word in own if word.startswith("--output=")]
    try:
        recipe = load_recipe(own[0], [word for word in own[1:] if not word.startswith("--output=")])
        folder = Path(outputs[-1] if outputs else f"runs/{recipe.name}")
        data = build_data(recipe)
        # Of other data the callback asks for more than a loss.
        evaluate = validation_callback(data.batches) if isinstance(data.batches, TextBatches) else None
        default = trainer_config(recipe, data, folder, evaluate)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    init_logger()
    ConfigManager.register_tyro_rules(custom_registry)
    config = tyro.cli(type(default), args=flags, default=default, registry=custom_registry)
    for name in ("steps", "seq_len", "global_batch_size"):
        if getattr(config.training, name) != getattr(default.training, name):
            sys.exit(f"--training.{name.replace('_', '-')} is the recipe's: change train.steps or data.* before `--`.")
    # torchtitan's command line makes objects of its own of what it has printed; ours stay as they are.
    ours = ("model_spec", "dataloader", "lr_scheduler", "optimizer", "recipe", "tokenizer_to_save", "on_evaluate")
    try:
        trainer = dataclasses.replace(config, **{name: getattr(default, name) for name in ours}).build()
        try:
            trainer.train()
        finally:
            trainer.close()
    except (ValueError, TrainingInterrupted, DivergenceError) as stopped:
        sys.exit(str(stopped))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
