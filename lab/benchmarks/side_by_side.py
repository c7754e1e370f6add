"""Two trainings side by side with one thread each, beside one after the other with two threads.

    python lab/benchmarks/side_by_side.py           # minutes, on a machine with two cores that does nothing else

Of each size, both ways take turns of `--seconds`: two workers of `lab/experiments/side_by_side.py` train at the same
time, then this process trains alone with two threads. A turn is counted while all of its trainings go, so what it takes
to begin one is left out. The ratio is that of the steps of all trainings in a second. Where it is above 1,
trainings side by side are finished earlier.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from diff_lab.bench.timing import spread
from diff_lab.coordinates import Coordinates
from diff_lab.experiments.experiment import Preset, Variant, find_experiment, section
from diff_lab.experiments.side_by_side import Job, SideBySide
from diff_lab.freed_memory import keep_freed_memory
from diff_lab.record import Result
from diff_lab.results_files import capture_results, write_json
from diff_lab.train import Progress, Recipe, train
from diff_lab.train.training_progress import Silent
from diff_transformer.processors import usable_processors

HERE = Path(__file__).parent
WARM_UP = 5  # steps that are not counted
BESIDE, ALONE = "side by side", "one after the other"


class EndOfTurnError(Exception):
    """The seconds of a turn are over."""


class Turn(Silent):
    """Counts the steps of so many seconds, two at least, from when all of so many trainings go, and then ends its own.

    A training that goes leaves a file in the folder.
    """

    def __init__(self, folder: Path, trainings: int, seconds: float) -> None:
        self.folder, self.trainings, self.seconds = folder, trainings, seconds
        self.steps: list[float] = []  # when each was done

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        now = time.monotonic()
        if len(self.steps) > 1 and now >= self.steps[0] + self.seconds:
            raise EndOfTurnError
        (self.folder / str(os.getpid())).touch()
        if self.steps or (step >= WARM_UP and len(list(self.folder.iterdir())) == self.trainings):
            self.steps.append(now)

    def speed(self) -> float:
        """Steps a second."""
        return (len(self.steps) - 1) / (self.steps[-1] - self.steps[0])


def speed_of_turn(recipe: Recipe, going: Path, trainings: int, seconds: float, _: Progress) -> float:
    """Steps a second of one of so many trainings that go at the same time."""
    turn = Turn(going, trainings, seconds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(recipe, Path(folder) / "run", progress=turn)
        except EndOfTurnError:
            return turn.speed()
    raise ValueError("The training ended before its turn.")


@dataclass(frozen=True)
class Size:
    """What is trained: a variant of an experiment's preset."""

    name: str
    preset: Preset
    variant: Variant

    def recipe(self) -> Recipe:
        """As long as it takes, and without validation."""
        settings = section("train", steps=10**6, evaluate_every=None, checkpoint_every=None, device="cpu")
        return self.preset.variant_recipe(self.variant, *settings)


def sizes() -> list[Size]:
    """Table 2's, and the language models of both sizes: the first variant of each."""
    table_2, language = find_experiment("table2").presets["cpu"], find_experiment("language").presets
    models = [(preset, preset.variants[0]) for preset in (language["evening"], language["night"])]
    return [
        Size("table2", table_2, table_2.variants[0]),
        *(Size(f"language, {variant.label}", preset, variant) for preset, variant in models),
    ]


def measure(size: Size, rounds: int, seconds: float) -> list[Result]:
    """Turns of either way. The records are the steps of all trainings in a second, and the ratio."""
    recipe = size.recipe()
    speeds: dict[str, list[float]] = {BESIDE: [], ALONE: []}
    with SideBySide[float](2, Silent(), threads=1) as beside:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                for number in (1, 2):
                    beside.add(Job(f"training {number}", partial(speed_of_turn, recipe, Path(folder), 2, seconds)))
                speeds[BESIDE].append(sum(speed for _, speed in beside.results()))
            with tempfile.TemporaryDirectory() as folder:
                speeds[ALONE].append(speed_of_turn(recipe, Path(folder), 1, seconds, Silent()))
    coordinates = Coordinates(part=size.name)
    ratios = spread([one / other for one, other in zip(speeds[BESIDE], speeds[ALONE], strict=True)])
    records = [
        Result(
            name="steps of all trainings",
            variant=way,
            coordinates=coordinates,
            value=statistics.median(values),
            unit="1/s",
            n=rounds,
            better="higher",
            method="median of the turns",
        )
        for way, values in speeds.items()
    ]
    ratio = Result(name="ratio", variant=BESIDE, coordinates=coordinates, value=ratios.median, better="higher")
    method = "median over the pairs of turns, between their quartiles"
    return [*records, replace(ratio, interval=ratios.quartiles, n=rounds, method=method)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of either way, 2 or more")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn")
    parser.add_argument("--output", type=Path, default=HERE / "side_by_side.json")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    keep_freed_memory()  # as the workers do, and the commands that train
    if usable_processors() < 2:
        raise SystemExit("Two trainings side by side need two processor cores.")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"The machine does something else (load {load:.1f}): the numbers are not worth keeping.")
    records = []
    for size in sizes():
        for record in measure(size, arguments.rounds, arguments.seconds):
            records.append(record)
            between = f", {record.interval[0]:.2f} to {record.interval[1]:.2f}" if record.interval else ""
            print(f"{size.name:28} {record.name:24} {record.variant:20} {record.value:8.2f}{between}", flush=True)
    settings = {"rounds": arguments.rounds, "seconds": arguments.seconds, "load": load, "cores": usable_processors()}
    settings["recipes"] = {size.name: size.recipe().model_dump(mode="json") for size in sizes()}
    document = capture_results("trainings side by side", settings, records, "cpu")
    print(f"{document.device}; {document.command}")
    print(f"wrote {write_json(arguments.output, document, indent=1)}")


if __name__ == "__main__":
    main()
