"""Reads the experiments of `experiments.yaml`, and completes them with what is no data.

These are numbers and comparisons that are computed, and headlines that depend on options.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diff_lab.coordinates import Coordinates
from diff_lab.experiments import gradients_and_speed, scaling, variants
from diff_lab.experiments.experiment import ComparisonRule, Experiment, Preset, Variant
from diff_lab.experiments.variants import written
from diff_lab.measure import many_shot
from diff_lab.measure.document_losses import CUMULATIVE_LOSS, Repeats
from diff_lab.measure.measurement import MeasurementRequest, Options, find_measurement
from diff_lab.measure.retrieval import NOISE_ACCURACY
from diff_lab.record import Comparison, Headline, Result
from diff_lab.train.recipe import read_yaml
from diff_transformer.utils.suggestions import did_you_mean

Settings = Mapping[str, Any]


def _figure_4(options: Settings) -> Headline:
    """Return the loss of the whole of the long documents."""
    return Headline(
        name=CUMULATIVE_LOSS,
        coordinates=Coordinates(first_tokens=options["length"]),
        claim="DIFF has a lower loss on long documents than the Transformer",
    )


def _figure_6(options: Settings) -> Headline:
    """Return the accuracy with as many demonstrations as there are, the fewest of them wrong."""
    return Headline(
        name=many_shot.ACCURACY,
        coordinates=Coordinates(noise=min(options["noises"]), shots=max(options["shots"])),
        claim=f"DIFF classifies by {max(options['shots'])} demonstrations better than the Transformer",
    )


def _figure_7(options: Settings) -> Headline:
    return Headline(
        name=many_shot.ORDER_VARIANCE,
        coordinates=Coordinates(orders=many_shot.ORDERS[0], noise=options["noises"][0]),
        claim="DIFF's answers depend less on the order of demonstrations than the Transformer's",
    )


def _noise(options: Settings) -> Headline:
    """Return the accuracy in the largest context."""
    most = options["pairs"][-1]
    return Headline(
        name=NOISE_ACCURACY,
        coordinates=Coordinates(pairs=most),
        claim=f"DIFF answers more questions about {most} pairs of one form than the Transformer",
    )


# By name, fields of `Experiment` that are no data. What is "derived" from the records is compared with them.
COMPUTED: dict[str, dict[str, Any]] = {
    "fig3": {"compare": scaling.compare, "options": Repeats},
    "fig4": {"headline": _figure_4},
    "noise": {"headline": _noise},
    "fig6": {"headline": _figure_6},
    "fig7": {"headline": _figure_7},
    "table7": {
        "measure_once": gradients_and_speed.measure_throughput,
        "options": gradients_and_speed.ThroughputOptions,
    },
    "appendix_g": {
        "compare": gradients_and_speed.compare_gradients,
        "on_evaluate": gradients_and_speed.on_evaluate,
        "logs": "gradients",
    },
    "lr_sensitivity": {"derived": scaling.derived},
}


def _preset(declared: Settings) -> Preset:
    fields = dict(declared)
    for name in ("overrides", "sweep", "extension"):
        fields[name] = written(fields.get(name, ()))
    if "variants" in fields:
        fields["variants"] = tuple(_variants(fields["variants"]))
    fields["learning_rates"] = tuple(fields.get("learning_rates", ()))
    return Preset(**fields)


def _variants(calls: Iterable[Mapping[str, Sequence[Any]]]) -> list[Variant]:
    """Return what functions of `variants.py` make, each called by name with its arguments."""
    made = (getattr(variants, name)(*arguments) for call in calls for name, arguments in call.items())
    return [variant for some in made for variant in some]


def _requests(declared: Sequence[Settings], preset: Preset) -> list[MeasurementRequest]:
    return [
        MeasurementRequest(
            name=one["name"],
            options={**(preset.options if one.get("preset") else {}), **one.get("options", {})},
            numbers=tuple(one.get("numbers", ())),
        )
        for one in declared
    ]


def _compare(
    declared: Sequence[Settings],
    paper: Mapping[str, Sequence[Settings]],
    derived: Callable[[Sequence[Result]], list[Result]] | None,
    records: Sequence[Result],
    _: Preset,
) -> list[Comparison]:
    """Make the comparisons that are declared."""
    every = [*records, *(derived(records) if derived is not None else ())]
    comparisons = []
    for one in declared:
        pattern = one.get("pattern")
        found = dict.fromkeys(record.name for record in every if pattern and re.fullmatch(pattern, record.name))
        for name in one.get("names", found):
            for variant, against, *unclaimed in one.get("pairs", [("diff", "softmax")]):
                rule = ComparisonRule(
                    name=name,
                    variant=variant,
                    against=against,
                    at=partial(_is_at, one.get("at", {})),
                    paper=partial(_paper_values, paper.get(name, ()), variant, against),
                    claimed=not unclaimed and one.get("claimed", True) and partial(_is_claimed, one),
                    exploratory=one.get("exploratory", False),
                    quality=one.get("quality", True),
                )
                comparisons += rule.comparisons(every)
    return comparisons


def _is_at(places: Mapping[str, Sequence[Any]], coordinates: Coordinates) -> bool:
    return all(coordinates.get(axis) in values for axis, values in places.items())


def _is_claimed(declared: Settings, coordinates: Coordinates) -> bool:
    is_denied = "unclaimed" in declared and _is_at(declared["unclaimed"], coordinates)
    return _is_at(declared.get("claimed_at", {}), coordinates) and not is_denied


def _paper_values(
    rows: Sequence[Settings], variant: str, against: str, coordinates: Coordinates
) -> tuple[float, float] | None:
    """Return the paper's values of two variants there, NaN for one that it does not give; None for neither."""
    for row in rows:
        at = row.get("at", {})
        if bool(at) == bool(coordinates) and _is_at({axis: [value] for axis, value in at.items()}, coordinates):
            values = [row.get(name, math.nan) for name in (variant, against)]
            return None if all(map(math.isnan, values)) else (values[0], values[1])
    return None


def _options(measurements: Sequence[Settings]) -> type[Options]:
    """Return the options of the measurement that takes the preset's."""
    names = (one["name"] for one in measurements if one.get("preset"))
    return next(map(find_measurement, names), Options)


def _texts(parts: Iterable[Any]) -> tuple[str, ...]:
    """Return the texts in lists of texts and lists."""
    return tuple(text for part in parts for text in ([part] if isinstance(part, str) else _texts(part)))


def _headline(declared: Settings) -> Callable[[Settings], Headline]:
    headline = Headline(**{**declared, "coordinates": Coordinates(declared.get("coordinates", {}))})
    return lambda _: headline


def _experiment(name: str, declared: Settings) -> Experiment:
    computed = dict(COMPUTED.get(name, {}))
    measurements = declared.get("measurements", ())
    rules = (declared.get("compare", ()), declared.get("paper", {}), computed.pop("derived", None))
    fields: dict[str, Any] = {
        "presets": {size: _preset(preset) for size, preset in declared["presets"].items()},
        "compare": partial(_compare, *rules),
        "requests": partial(_requests, measurements),
        "options": _options(measurements),
        "headline": _headline(declared["headline"]) if "headline" in declared else None,
    }
    fields |= {"notes": _texts(declared["notes"]), "rehearsal": declared.get("rehearsal", {})}
    return Experiment(**{"name": name, "shows": declared["shows"], **fields, **computed})


def _read() -> dict[str, Experiment]:
    declared = read_yaml(Path(__file__).with_name("experiments.yaml").read_text(encoding="utf-8"))
    del declared["shared"]  # what others name
    return {name: _experiment(name, one) for name, one in declared.items()}


EXPERIMENTS = _read()  # in the order of the paper


# Tables and figures of the paper that another experiment shows.
SHOWN_BY = dict.fromkeys(("table2", "fig5", "table3", "recall"), "noise")


def find_experiment(name: str) -> Experiment:
    """Return the experiment of that name, or the one that shows the table or figure of that name.

    Raises ValueError with the nearest name and all names if there is none.
    """
    name = name if name in EXPERIMENTS else SHOWN_BY.get(name, name)
    if name not in EXPERIMENTS:
        names = ", ".join(EXPERIMENTS)
        raise ValueError(f"There is no experiment {name!r}{did_you_mean(name, EXPERIMENTS)} There are {names}.")
    return EXPERIMENTS[name]
