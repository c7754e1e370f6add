"""The command `info` shows the backends of this machine."""


def info() -> None:
    """Show the versions, the device, and which backends can run here or why they cannot."""
    import torch
    from rich.table import Table
    from rich.text import Text

    from diff_transformer._version import CHECKOUT, INSTALL_LAB
    from diff_transformer.cli import EXTRAS, console
    from diff_transformer.ops.attention_request import triton_is_installed
    from diff_transformer.ops.backends import explain
    from diff_transformer.ops.cpu import cpu_build
    from diff_transformer.ops.triton import gpu_check
    from diff_transformer.utils.environment import device_name, git_commit, installed_version, versions

    rows = {"device": device_name(), "torch threads": str(torch.get_num_threads())}
    rows |= {"commit": commit} if (commit := git_commit()) else {}
    rows |= versions()
    rows["diff-transformer-lab"] = installed_version("diff-transformer-lab", f"not installed: {INSTALL_LAB} does")
    for extra, packages in EXTRAS.items():
        missing = f'not installed: pip install ".[{extra}]" {CHECKOUT}'
        rows |= {package: installed_version(package, missing) for package in packages}
    # Each device is asked for the dtype that training uses on it.
    for device, dtype in {"cpu": torch.float32, "cuda": torch.bfloat16}.items():
        if device == "cuda" and not torch.cuda.is_available():
            rows["backends on cuda"] = "torch finds no CUDA device"
            continue
        for backend, reason in explain(device, dtype).items():
            rows[f"backend {backend} on {device}"] = "can run" if reason is None else f"cannot run: {reason}"
    rows["fused CPU kernel"] = cpu_build.status()
    if torch.cuda.is_available() and torch.version.hip is None and triton_is_installed():
        rows["Triton kernels on cuda"] = gpu_check.status()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    console.output().print(table)
