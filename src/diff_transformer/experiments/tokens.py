"""What the experiments on drawn tokens share on two cores: a model that trains in a minute."""

SMALL = (
    "model.hidden_size=64",
    "model.intermediate_size=172",
    "model.num_hidden_layers=2",
    "train.inspect_every=null",
)
# With a small rope_theta a small model finds a token's neighbour sooner.
FINDING = (*SMALL, "model.rope_theta=10", "train.evaluate_every=250", "train.checkpoint_every=500")
