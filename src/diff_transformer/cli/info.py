"""`diff-transformer info`"""


def info() -> None:
    """Show versions, the device, and which backends can run here, or why not."""
    from importlib import metadata

    import torch
    from rich.table import Table
    from rich.text import Text

    from diff_transformer import CHECKOUT
    from diff_transformer.cli import TRAIN_EXTRA, console
    from diff_transformer.ops.backends import explain
    from diff_transformer.ops.cpu import build
    from diff_transformer.results import capture_environment

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return f'not installed: pip install ".[train]" {CHECKOUT}'

    environment = capture_environment()
    rows = {"device": environment.device, "torch threads": str(torch.get_num_threads())}
    rows |= {"commit": environment.commit} if environment.commit else {}
    rows |= environment.versions
    rows |= {package: version(package) for package in TRAIN_EXTRA.values()}
    # In the dtype that training uses there.
    for device, dtype in {"cpu": torch.float32, "cuda": torch.bfloat16}.items():
        if device == "cuda" and not torch.cuda.is_available():
            rows["backends on cuda"] = "torch finds no CUDA device"
            continue
        for backend, reason in explain(device, dtype).items():
            rows[f"backend {backend} on {device}"] = "can run" if reason is None else f"cannot run: {reason}"
    rows["fused CPU kernel"] = build.status()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    console.output().print(table)
