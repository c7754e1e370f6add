"""Settings of the demo that end in seconds and show nothing but that everything runs."""

from diff_lab.experiments.experiment import section

_BOTH = (
    *section("train", steps=6, log_every=2, evaluate_every=2, warmup_steps=1, checkpoint_every=3),
    *section("model", hidden_size=32, intermediate_size=32, head_dim=8, num_hidden_layers=2),
)
TINY = {
    "retrieval": (*_BOTH, *section("data", batch_size=4)),
    "language": (*_BOTH, *section("data", vocab_size=300, batch_size=4, length=64, validation_tokens=1024)),
}
