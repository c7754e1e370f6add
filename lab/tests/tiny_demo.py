"""Settings of the demo that end in seconds and show nothing but that everything runs."""

from diff_lab.experiments.experiment import section

TINY = (
    *section("train", steps=6, log_every=2, evaluate_every=2, warmup_steps=1, checkpoint_every=3),
    *section("model", hidden_size=32, intermediate_size=32, num_attention_heads=4),
    *section("data", pairs=4, questions=2, tokens=8, batch_size=4),
)
