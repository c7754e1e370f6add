"""Trains a recipe with torchtitan, whose own flags follow `--`.

torchrun --nproc-per-node 8 -m diff_lab.titan paper-3b 'data.paths=[text]' -- --parallelism.tensor-parallel-degree 2
"""

import dataclasses
import sys
from argparse import ArgumentParser
from contextlib import closing
from pathlib import Path

import torch.distributed as dist
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry
from torchtitan.tools.logging import init_logger

from diff_lab.titan.trainer import trainer_config
from diff_lab.train import TrainingInterrupted
from diff_lab.train.recipe import load_recipe
from diff_lab.train.run_setup import build_data
from diff_lab.train.step import DivergenceError


def main(arguments: list[str]) -> None:
    """Run `RECIPE [KEY=VALUE …] [--output=FOLDER] [-- FLAGS]`."""
    end = [*arguments, "--"].index("--")
    parser = ArgumentParser("diff_lab.titan", description=__doc__)
    parser.add_argument("recipe", help="as of `diff-lab train`")
    parser.add_argument("changes", nargs="*", help="KEY=VALUE")
    parser.add_argument("--output", type=Path, help="folder of the run, runs/RECIPE unless given")
    own = parser.parse_intermixed_args(arguments[:end])
    try:
        recipe = load_recipe(own.recipe, own.changes)
        folder = own.output or Path("runs", recipe.name)
        default = trainer_config(recipe, build_data(recipe), folder)
        init_logger()
        ConfigManager.register_tyro_rules(custom_registry)
        config = tyro.cli(type(default), args=arguments[end + 1 :], default=default, registry=custom_registry)
        for name in ("steps", "seq_len", "global_batch_size"):
            if getattr(config.training, name) != getattr(default.training, name):
                sys.exit(f"--training.{name.replace('_', '-')}: change train.steps or data.* before `--`.")
        start = config.checkpoint.initial_load_path
        if start and not config.checkpoint.initial_load_in_hf:  # torchtitan would unpickle its index
            sys.exit(f"--checkpoint.initial-load-path {start!r} needs safetensors and --checkpoint.initial-load-in-hf.")
        model = folder / config.checkpoint.folder / f"step-{recipe.train.steps}"
        if (model / "config.json").is_file():
            sys.exit(f"The run is finished, and {str(model)!r} is its model: a larger train.steps trains it further.")
        # torchtitan's command line makes objects of its own of what it has printed; ours stay as they are.
        ours = ("model_spec", "dataloader", "lr_scheduler", "optimizer", "recipe", "tokenizer")
        with closing(dataclasses.replace(config, **{name: getattr(default, name) for name in ours}).build()) as trainer:
            trainer.train()
    except (ValueError, OSError, TrainingInterrupted, DivergenceError) as stopped:
        sys.exit(str(stopped))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
