"""A model gives the same bits in a process's first call and in later ones, before a training step and after, loaded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fresh
from full_run import short_run
from tiny_model import KINDS

CODE = """
import sys
import torch
from safetensors.torch import load_file, save_file
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import sizes_for

kind, folder = sys.argv[1:]
sizes = sizes_for(kind, hidden_size=72, head_dim=12, num_attention_heads=8, num_hidden_layers=3)  # no narrow heads
torch.manual_seed(0)
model = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes)).eval()
for name, parameter in model.named_parameters():
    if ".lam." in name:
        parameter.data.mul_(4)
if folder != "-":
    model.load_state_dict(load_file(folder + "/weights"))  # copied into memory that begins as every tensor does
torch.manual_seed(1)
inputs = torch.randint(1, 29, (2, 70))

def answers():
    with torch.no_grad():
        past = model(inputs[:, :-1], use_cache=True).past_key_values
        return torch.cat((model(inputs).logits, model(inputs[:, -1:], past_key_values=past).logits), 1)

first = answers()
assert torch.equal(answers(), first), "second call"
assert torch.equal(model(inputs).logits, first[:, :70]), "with a gradient"
model.train()
loss = model(inputs, labels=inputs).loss
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.0).step()
model.eval()
assert torch.equal(answers(), first), "after a step"
again = model(inputs, labels=inputs).loss
assert torch.equal(again, loss), "training and evaluation"
save_file({"first": first}, "first" if folder == "-" else "loaded")
if folder == "-":
    save_file(model.state_dict(), "weights")
"""


@pytest.mark.parametrize("kind", short_run(KINDS, ["diff"]))
def test_in_fresh_processes(kind: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{CODE}"
    for folder in ("-", str(tmp_path)):
        done = fresh.run(code, kind, folder, folder=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    assert torch.equal(load_file(tmp_path / "first")["first"], load_file(tmp_path / "loaded")["first"])
