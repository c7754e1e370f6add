"""`diff-transformer eval --measure NAME`: one measurement, or several, on a checkpoint alone."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diff_transformer.eval.measures import Measure
    from diff_transformer.results import Result


def evaluate_measures(
    checkpoint: Path,
    text: list[Path] | None,
    names: list[str],
    given: list[str],
    output: Path | None,
    device: str | None,
) -> None:
    """Measure, print the table, and write the results where a file is asked for."""
    from diff_transformer.cli import console
    from diff_transformer.cli.checkpoints import find_checkpoint, load_model, load_tokenizer
    from diff_transformer.cli.evaluate import batches_of
    from diff_transformer.cli.options import parse_options
    from diff_transformer.data import NeedleBatches, TextBatches
    from diff_transformer.eval.measures import Subject, find_measure
    from diff_transformer.report.table import measure_table
    from diff_transformer.results import capture_results, write_json

    measures = {name: find_measure(name) for name in names}
    options = _options(measures, parse_options(given))
    if text and not any(measure.needs for measure in measures.values()):
        raise ValueError(f"--text does not go with the measure {', '.join(measures)}, which takes no text.")
    console.quiet_libraries()
    folder = find_checkpoint(checkpoint, ours=not all(measure.any_model for measure in measures.values()))
    model = load_model(folder, device)
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    arm = getattr(model.config, "attention_type", model.config.model_type)
    context = getattr(model.config, "max_position_embeddings", None)
    batches = batches_of(folder, text, context) if any(measure.needs for measure in measures.values()) else None
    if batches is not None and not isinstance(batches, TextBatches | NeedleBatches):
        for name, measure in measures.items():
            if measure.needs == "text":
                raise ValueError(
                    f"The measure {name} is taken on text, and the run was not trained on any: name some with --text."
                )
    records: list[Result] = []
    for name, measure in measures.items():
        data = batches if measure.needs else None
        records += measure.measure(
            Subject(model=model, arm=arm, batches=data, tokenizer=tokenizer, options=options[name])
        )
    settings = {"checkpoint": folder, "text": text, "measures": options}
    records = [replace(record, documents=()) for record in records]
    results = capture_results(f"{', '.join(measures)} of {folder}", settings, records, str(model.device))
    console.output().print(measure_table(results))
    if output is not None:
        write_json(output, results)


def _options(measures: "dict[str, Measure]", given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each measure, with what the user gave.

    Raises:
        ValueError: one that no measure has, or of another kind than a measure's that has it.
    """
    from diff_transformer.eval.options import chosen_options, refuse_unknown

    known = list(dict.fromkeys(option for measure in measures.values() for option in measure.options))
    refuse_unknown(given, known, f"The measure {', '.join(measures)}")
    return {
        name: chosen_options(
            {option: value for option, value in given.items() if option in measure.options},
            measure.options,
            f"The measure {name}",
        )
        for name, measure in measures.items()
    }
