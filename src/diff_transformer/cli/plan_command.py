"""The command `plan` prints what a training run would take without running it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from diff_transformer.cli import console
from diff_transformer.cli.console import RecipeName, RecipeSettings, optional, read_recipe

if TYPE_CHECKING:
    from rich.table import Table

    from diff_transformer.train.training_plan import Plan, Way


def plan(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    gpus: Annotated[int, typer.Option(help="The number of GPUs.")] = 1,
    gpu: Annotated[
        str, typer.Option(help="The GPU: h200, a100-80, rtx-4090 …; or cpu for the processor of this machine.")
    ] = "cpu",
    utilisation: Annotated[
        float,
        typer.Option(help="The share of the GPUs' peak that training reaches while no GPU waits for communication."),
    ] = 0.4,
    network: Annotated[
        float | None,
        optional(
            "The bandwidth between machines in GB/s for each GPU (400 Gb/s are 50).",
            "that of the vendor's reference machine",
        ),
    ] = None,
    parallel: Annotated[
        str | None, optional("How the run is parallel: ddp, fsdp or tensor.", "the recipe's train.parallel")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the parameters, operations, memory, communication, time and disk space that a recipe would take."""
    from diff_transformer.train.training_plan import plan as plan_recipe

    made = plan_recipe(
        read_recipe(recipe, settings),
        gpu,
        gpus,
        parallel=parallel,
        utilisation=utilisation,
        network=None if network is None else network * 1e9,
    )
    if as_json:
        memory = [{**asdict(way.memory), "total": way.memory.total} for way in made.ways]
        ways = [{**asdict(way), "memory": held} for way, held in zip(made.ways, memory, strict=True)]
        console.print_line(json.dumps({**asdict(made), "ways": ways}, indent=1))
        return
    console.print_line(f"{made.name} · {made.attention_type}")
    for label, text in _facts(made):
        console.print_line(f"{label:17}{text}")
    console.output().print(_table(made))
    for way in made.ways:
        console.print_line(_advice(made, way))


# Units from the largest to the smallest.
COUNTS = {"B": 1e9, "M": 1e6}
BYTES = {" TB": 1e12, " GB": 1e9, " MB": 1e6, " kB": 1e3, " bytes": 1}
DAYS = {" days": 1, " hours": 1 / 24, " minutes": 1 / (24 * 60), " seconds": 1 / (24 * 60 * 60)}
SHARED_HOW = {"single": "", "ddp": ", weights whole on each (ddp)", "fsdp": ", weights sharded (fsdp)"}
SENT = {
    "ddp": "gradients are added up while the backward pass runs",
    "fsdp": "weights are gathered and gradients scattered while the layers compute",
    "tensor": "each layer's outputs and gradients are added up, and nothing can run meanwhile",
}


def _facts(made: "Plan") -> Iterator[tuple[str, str]]:
    """What is planned, a line for each fact; a line without a label belongs to the one above."""
    tokens = f"{made.tokens_per_step:,} tokens, {made.steps * made.tokens_per_step:.3g} tokens"
    where = "this machine's processor" if made.device == "cpu" else f"{made.devices} × {made.device}"
    how = SHARED_HOW.get(made.kind, ", heads shared out (tensor)")
    yield "parameters", f"{made.parameters:,} ({_scaled(made.parameters, COUNTS)})"
    yield "operations", f"{made.flops_per_token:.3g} FLOPs per token, forward and backward, nothing twice"
    yield "run", f"{made.steps:,} steps of {tokens}"
    yield "data", made.data
    yield "on", f"{where}{how}, precision {made.precision}"
    yield from _communication(made)
    if made.peak is not None and made.days is not None:
        peak = f"{made.utilisation:.0%} of {made.peak / 1e12:.3g} TFLOP/s"
        yield "time", f"{_scaled(made.days, DAYS)} at {peak}; evaluation and saving come on top"
        if made.utilisation < made.assumed:
            slow = "communication takes longer than what runs meanwhile"
            yield "", f"(at best: {slow}, so {made.assumed:.0%} cannot be reached)"
    one, several = _scaled(made.checkpoint_bytes, BYTES), _scaled(made.checkpoints_bytes, BYTES)
    yield "disk", f"{one} a checkpoint, {several} with those that stay and one being written"
    if made.token_cache_bytes is not None:
        read = _scaled(made.token_cache_bytes, BYTES)
        yield "", f"{read} of tokens are read; the cache (data.cache) holds the whole text"
    mebi, unit = _unit(made)
    usable = "" if made.device_memory is None else f", where {made.device_memory / mebi:,.0f} {unit} can be used"
    yield "memory", f"{unit} on each when most is held{usable};"
    yield "", f"{made.micro_batch} sequences at a time (train.accumulation={made.accumulation})"
    if made.device == "cpu":
        glibc = "glibc keeps freed blocks, up to 40 % more, unless the environment says MALLOC_MMAP_THRESHOLD_=65536"
        yield "", f"(of tensors; {glibc})"


def _communication(made: "Plan") -> Iterator[tuple[str, str]]:
    """What each GPU receives in a step, and which bandwidth that needs and has."""
    sent = made.communication
    if sent is None:
        return
    yield "communication", f"{sent.received / 1e9:.3g} GB to each GPU per step: {SENT[made.kind]};"
    inside, outside = (None, None) if made.needed is None else (made.needed[0] - made.needed[1], made.needed[1])
    parts = [("inside a machine", sent.received - sent.through_network, sent.link, inside, "")]
    if sent.through_network:
        ask = ", give it with --network GB/s"
        parts.append(("through its network card", sent.through_network, sent.network, outside, ask))
    for where, size, bandwidth, needed, ask in parts:
        wants = "" if needed is None else f", hidden behind the computation at {needed / 1e9:.3g} GB/s or more"
        has = f"a GPU has {bandwidth / 1e9:.3g}" if bandwidth else f"what a GPU has is unknown{ask}"
        yield "", f"{size / 1e9:.3g} GB {where}{wants}; {has}"


def _table(made: "Plan") -> "Table":
    from rich.table import Table

    size, _ = _unit(made)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for way in made.ways:
        mine = " (the recipe's)" if way.checkpointing == made.checkpointing else ""
        table.add_column(("with" if way.checkpointing else "without") + f" checkpointing{mine}", justify="right")
    for name in ("weights", "gradients", "optimizer", "activations", "workspace", "total"):
        table.add_row(name, *(f"{getattr(way.memory, name) / size:,.2f}" for way in made.ways))
    table.add_row("fits", *({True: "yes", False: "no", None: "?"}[way.fits] for way in made.ways))
    return table


def _advice(made: "Plan", way: "Way") -> str:
    which = f"train.gradient_checkpointing={str(way.checkpointing).lower()}"
    if made.device_memory is None:
        return f"{which}: the memory of this machine is not known"
    if way.accumulation is None:
        return f"{which}: does not fit, not even one sequence at a time"
    return f"{which}: fits with train.accumulation={way.accumulation}, {way.micro_batch} sequences at a time"


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """A value in the largest unit that it reaches, or in the smallest one."""
    unit = next((name for name, size in units.items() if value >= size), list(units)[-1])
    return f"{value / units[unit]:.3g}{unit}"


def _unit(made: "Plan") -> tuple[int, str]:
    """GiB, or MiB for what is small."""
    return (1 << 30, "GiB") if max(way.memory.total for way in made.ways) >= 1 << 30 else (1 << 20, "MiB")
