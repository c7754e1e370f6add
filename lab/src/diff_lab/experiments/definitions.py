"""Reads the experiments of `experiments.yaml`, and completes them with numbers and comparisons that are computed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diff_lab.coordinates import Coordinates
from diff_lab.experiments import computed, variants
from diff_lab.experiments.experiment import ComparisonRule, Experiment, Preset, compared_by
from diff_lab.experiments.variants import written
from diff_lab.measure.document_losses import Repeats
from diff_lab.measure.measurement import MeasurementRequest, Options, find_measurement
from diff_lab.record import Headline
from diff_lab.train.recipe import read_yaml
from diff_transformer.utils.suggestions import did_you_mean

Settings = Mapping[str, Any]


# By name, fields of `Experiment` that are no data. What is "derived" from the records is compared with them.
COMPUTED: dict[str, dict[str, Any]] = {
    "fig3": {"compare": computed.compare_sizes, "options": Repeats},
    "table7": {"measure_once": computed.measure_throughput, "options": computed.ThroughputOptions},
    "appendix_g": {"compare": computed.compare_gradients, "on_evaluate": computed.on_evaluate, "logs": "gradients"},
    "lr_sensitivity": {"derived": computed.loss_by_rate},
}


def _preset(declared: Settings) -> Preset:
    fields = dict(declared)
    for name in ("overrides", "sweep", "extension"):
        fields[name] = written(fields.get(name, ()))
    if "variants" in fields:
        calls = ((getattr(variants, name), given) for call in fields["variants"] for name, given in call.items())
        fields["variants"] = tuple(variant for make, given in calls for variant in make(*given))
    fields["learning_rates"] = tuple(fields.get("learning_rates", ()))
    return Preset(**fields)


def _requests(declared: Sequence[Settings], preset: Preset) -> list[MeasurementRequest]:
    return [
        MeasurementRequest(
            name=one["name"],
            options={**(preset.options if one.get("preset") else {}), **one.get("options", {})},
            numbers=tuple(one.get("numbers", ())),
        )
        for one in declared
    ]


def _options(measurements: Sequence[Settings]) -> type[Options]:
    """Return the options of the measurement that takes the preset's."""
    return next((find_measurement(one["name"]) for one in measurements if one.get("preset")), Options)


def _headline(declared: Settings) -> Callable[[Settings], Headline]:
    """Return the headline by options: coordinates are some of these, and words of the claim."""
    fields, at = dict(declared), declared.get("coordinates", {})
    chosen = fields.pop("options", {})

    def headline(options: Settings) -> Headline:
        values = {}
        for axis, (option, *place) in chosen.items():
            values[axis] = options[option][place[0]] if place else options[option]
        claim = fields["claim"].format(**values)
        return Headline(**{**fields, "coordinates": Coordinates(at, **values), "claim": claim})

    return headline


def _experiment(name: str, declared: Settings) -> Experiment:
    own = dict(COMPUTED.get(name, {}))
    derived = own.pop("derived", None)
    rules = [ComparisonRule(**one) for one in declared.get("compare", ())]
    compare = compared_by(*rules, paper=declared.get("paper"))
    measurements = declared.get("measurements", ())
    fields: dict[str, Any] = {
        "presets": {size: _preset(preset) for size, preset in declared["presets"].items()},
        "compare": compare,
        "requests": partial(_requests, measurements),
        "options": _options(measurements),
        "headline": _headline(declared["headline"]) if "headline" in declared else None,
        "notes": tuple(declared["notes"]),
    }
    if derived is not None:
        fields["compare"] = lambda records, preset: compare([*records, *derived(records)], preset)
    return Experiment(**{"name": name, "shows": declared["shows"], **fields, **own})


_DECLARED = read_yaml(Path(__file__).with_name("experiments.yaml").read_text(encoding="utf-8"))
del _DECLARED["shared"]  # what others name
_DEMO = _DECLARED.pop("demo")
# The overrides of the demo's recipe, further ones by which it takes a minute, and a text for the user.
DEMO, FAST_DEMO, EXPECTATIONS = written(_DEMO["settings"]), written(_DEMO["fast"]), _DEMO["expectations"]
EXPERIMENTS = {name: _experiment(name, one) for name, one in _DECLARED.items()}  # in the order of the paper

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
