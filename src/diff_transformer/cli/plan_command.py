"""The command `plan` prints what a training run would take without running it."""

from typing import TYPE_CHECKING, Annotated

import typer

from diff_transformer.cli import console
from diff_transformer.cli.console import RecipeName, RecipeSettings, read_recipe

if TYPE_CHECKING:
    from rich.table import Table

    from diff_transformer.train.training_plan import Plan, Way


def plan(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    gpus: Annotated[int, typer.Option(help="The number of GPUs.")] = 1,
    gpu: Annotated[
        str, typer.Option(help="The GPU: h200, a100-80, rtx-4090 …; or cpu for the processor of this machine.")
    ] = ("cpu"),
    utilisation: Annotated[
        float,
        typer.Option(help="The share of the GPUs' peak that training reaches while no GPU waits for communication."),
    ] = 0.4,
    network: Annotated[
        float | None,
        typer.Option(
            help="The bandwidth between machines in GB/s for each GPU (400 Gb/s are 50).",
            show_default="that of the vendor's reference machine",
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(help="How the run is parallel: ddp, fsdp or tensor.", show_default="the recipe's train.parallel"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
    out = console.output()
    if json:
        console.print_line(_json(made))
        return
    for line in _facts(made):
        console.print_line(line)
    out.print(_table(made))
    for way in made.ways:
        console.print_line(_advice(made, way))


def _json(made: "Plan") -> str:
    import dataclasses
    import json

    values = dataclasses.asdict(made)
    for way, found in zip(values["ways"], made.ways, strict=True):
        way["memory"]["total"] = found.memory.total
    return json.dumps(values, indent=1)


def _facts(made: "Plan") -> list[str]:
    how = {"single": "", "ddp": ", weights whole on each (ddp)", "fsdp": ", weights sharded (fsdp)"}
    where = "this machine's processor" if made.device == "cpu" else f"{made.devices} × {made.device}"
    lines = [
        f"{made.name} · {made.attention_type}",
        f"parameters       {made.parameters:,} ({_short(made.parameters)})",
        f"operations       {made.flops_per_token:.3g} FLOPs per token, forward and backward, nothing twice",
        f"run              {made.steps:,} steps of {made.tokens_per_step:,} tokens, "
        f"{made.steps * made.tokens_per_step:.3g} tokens",
        f"data             {made.data}",
        f"on               {where}{how.get(made.kind, ', heads shared out (tensor)')}, precision {made.precision}",
    ]
    lines += _communication(made)
    if made.peak is not None and made.days is not None:
        peak = f"{made.utilisation:.0%} of {made.peak / 1e12:.3g} TFLOP/s"
        lines.append(f"time             {_duration(made.days)} at {peak}; evaluation and saving come on top")
        if made.utilisation < made.assumed:
            lines.append(
                f"{_INDENT}(at best: communication takes longer than what runs meanwhile, so {made.assumed:.0%} "
                "cannot be reached)"
            )
    lines += _disk(made)
    size, unit = _unit(made)
    room = "" if made.device_memory is None else f", where {made.device_memory / size:,.0f} {unit} can be used"
    lines.append(f"memory           {unit} on each when most is held{room};")
    lines.append(f"                 {made.micro_batch} sequences at a time (train.accumulation={made.accumulation})")
    if made.device == "cpu":
        lines.append(
            "                 (of tensors; glibc keeps freed blocks, up to 40 % more, unless the environment says "
            "MALLOC_MMAP_THRESHOLD_=65536)"
        )
    return lines


_INDENT = " " * 17
_SENT = {
    "ddp": "gradients are added up while the backward pass runs",
    "fsdp": "weights are gathered and gradients scattered while the layers compute",
    "tensor": "each layer's outputs and gradients are added up, and nothing can run meanwhile",
}
_UNKNOWN = ("", ", give it with --network GB/s")


def _communication(made: "Plan") -> list[str]:
    """What each GPU receives in a step, and which bandwidth that needs and has."""
    sent = made.communication
    if sent is None:
        return []
    lines = [f"communication    {sent.received / 1e9:.3g} GB to each GPU per step: {_SENT[made.kind]};"]
    parts = [("inside a machine", sent.received - sent.through_network, sent.link)]
    if sent.through_network:
        parts.append(("through its network card", sent.through_network, sent.network))
    needed = None
    if made.needed is not None:
        needed = made.needed[0] - made.needed[1], made.needed[1]
    for number, (where, size, bandwidth) in enumerate(parts):
        wants = "" if needed is None else f", hidden behind the computation at {needed[number] / 1e9:.3g} GB/s or more"
        has = f"a GPU has {bandwidth / 1e9:.3g}" if bandwidth else f"what a GPU has is unknown{_UNKNOWN[number]}"
        lines.append(f"{_INDENT}{size / 1e9:.3g} GB {where}{wants}; {has}")
    return lines


def _disk(made: "Plan") -> list[str]:
    lines = [
        f"disk             {_bytes(made.checkpoint_bytes)} a checkpoint, {_bytes(made.checkpoints_bytes)} with those "
        "that stay and one being written"
    ]
    if made.token_cache_bytes is not None:
        tokens = _bytes(made.token_cache_bytes)
        lines.append(f"{_INDENT}{tokens} of tokens are read; the cache (data.cache) holds the whole text")
    return lines


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


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


def _short(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _unit(made: "Plan") -> tuple[int, str]:
    """GiB, or MiB for what is small."""
    return (1 << 30, "GiB") if max(way.memory.total for way in made.ways) >= 1 << 30 else (1 << 20, "MiB")


def _duration(days: float) -> str:
    if days >= 1:
        return f"{days:.3g} days"
    hours = days * 24
    if hours >= 1:
        return f"{hours:.3g} hours"
    return f"{hours * 60:.3g} minutes" if hours * 60 >= 1 else f"{hours * 3600:.2g} seconds"
