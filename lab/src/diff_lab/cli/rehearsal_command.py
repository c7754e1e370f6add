"""Carries out `reproduce --rehearse`: each experiment small, in a temporary folder, and what it took."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from diff_lab.cli.failures import message_among, refuse_failed
from diff_transformer.cli import console

if TYPE_CHECKING:
    from diff_lab.experiments.request import ExperimentRequest


def rehearse_all(requests: "Sequence[ExperimentRequest]") -> None:
    """Rehearse experiments one after the other and write their report, all of it into a folder that is then removed.

    Raises ValueError, after the table of what was rehearsed, where one of several failed.
    """
    from diff_lab.experiments.rehearsal import rehearse
    from diff_lab.experiments.request import as_defined
    from diff_lab.report.documents import Table
    from diff_lab.report.pages import DOCUMENT, build_results_report
    from diff_lab.train.progress import RunProgress

    messages = console.messages()
    phases = ("checks", "small experiment")
    rows: list[tuple[str, ...]] = []
    failed: list[str] = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for request in requests:
            name = request.experiment.name
            messages.print(f"{name}: rehearsed in a temporary folder", markup=False, soft_wrap=True)
            try:
                rehearsal = rehearse(request, folder, RunProgress(messages))
            except Exception as error:
                messages.print(f"error: {name}: {message_among(error, len(requests))}", markup=False, soft_wrap=True)
                failed.append(name)
                continue
            seconds = (f"{rehearsal.seconds[phase]:.1f}" for phase in phases)
            rows.append((name, *seconds, str(len(rehearsal.results.comparisons))))
        if rows:
            build_results_report([folder], folder / DOCUMENT, as_defined)
    head = ("experiment", *(f"{phase}, s" for phase in phases), "comparisons")
    caption = (
        "All files were written, the report too. Checks are of the preset itself, comparisons of the small experiment."
    )
    if rows:
        console.output().print(Table.of_rows(head, rows, caption=caption, right=head[1:], one_line=head[:1]))
    refuse_failed(failed, len(requests), "rehearsed")
