"""Makes the typer application of `diff-lab` from its table of commands."""

from diff_transformer.cli.app import Commands, make_app

# Command → "module:function".
COMMANDS = {
    "demo": "experiment_commands:demo",
    "tokenizer": "train_commands:tokenizer",
    "prepare": "train_commands:prepare",
    "train": "train_commands:command",
    "plan": "train_commands:plan",
    "eval": "eval_command:evaluate",
    "reproduce": "experiment_commands:reproduce",
    "compare": "experiment_commands:compare",
    "report": "experiment_commands:report",
    "bench": "bench_command:bench",
}


class LabCommands(Commands):
    """The commands of the laboratory."""

    program = "diff-lab"
    table = COMMANDS
    package = "diff_lab.cli"


app = make_app(LabCommands, "Train and measure Differential Transformers beside Transformers of the same size.")
