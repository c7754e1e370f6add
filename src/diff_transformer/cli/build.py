"""`diff-transformer build`"""

from typing import Annotated

import typer


def build(
    force: Annotated[bool, typer.Option("--force", help="Compile again, even if it has been done.")] = False,
) -> None:
    """Compile the CPU kernel now, and not when it is first used."""
    from diff_transformer.cli import console
    from diff_transformer.ops.cpu.build import BuildError, compile_library

    try:
        compiled = compile_library(force=force)
    except BuildError as error:
        raise ValueError(f"The CPU kernel cannot be compiled: {error}.") from None
    when = "before" if compiled.seconds is None else f"in {compiled.seconds:.1f} s"
    line = f"compiled for {compiled.capability} {when}: {compiled.path}"
    console.output().print(line, markup=False, soft_wrap=True)
