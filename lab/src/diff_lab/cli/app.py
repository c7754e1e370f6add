"""Makes the typer application of `diff-lab` from its table of commands."""

from diff_transformer.cli.app import Commands, Trial, make_app

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
# On two processor cores. lab/tests/cli/test_start_page.py holds the times to what the commands say themselves.
TRIALS = (
    Trial("demo", "4 to 8 minutes", "a DIFF Transformer and a Transformer learn the same, and are compared"),
    Trial("reproduce v2", "5 minutes", "an experiment with seeds, intervals and a verdict"),
    Trial("bench operator", "2 minutes", "the operator's time against that of softmax attention, on this machine"),
)


class LabCommands(Commands):
    """The commands of the laboratory."""

    program = "diff-lab"
    table = COMMANDS
    package = "diff_lab.cli"


app = make_app(LabCommands, "Train and measure Differential Transformers beside Transformers of the same size.", TRIALS)
