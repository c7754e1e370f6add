"""The numbers of each layer, against the independent implementation in float64; and a model that is left as it was.

With two ranks, which run this file as a script, both together find what one process finds.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import oracle
import ranks
from diff_lab.data.batches import flattened
from diff_lab.train import layer_statistics
from diff_lab.train.layer_statistics import measure_layers
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.parallel import shard
from tiny_model import PAIRED, SIZES, check_rounding

KINDS = tuple(ATTENTION_TYPES)
NAMES_OF_KIND = {**{kind: {"norm_input_rms"} for kind in PAIRED}, "diff_v2": {"lambda_mean"}}
NAMES = {kind: {"logit_max", "hidden_rms"} | NAMES_OF_KIND.get(kind, set()) for kind in KINDS}
TOKENS = torch.arange(1, 23).view(2, 11)  # a row for each rank
DOCUMENTS = ([0, 4, 5, 11], [0, 7, 11])  # of each row
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]])
ROW = {"input_ids": TOKENS[:1]}
PACKED = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": POSITIONS}


def make(kind: str = "diff", dtype: torch.dtype = torch.float64, **config: Any) -> DiffTransformerForCausalLM:
    """A model in training mode whose attention is peaked: any token that is wrongly seen or hidden shows."""
    model = DiffTransformerForCausalLM(
        DiffTransformerConfig(attention_type=kind, **{**SIZES, "vocab_size": 30, **config})
    )
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2 * parameter.shape[1] ** -0.5)
            elif ".lam." in name:
                parameter.normal_(std=0.6)
            else:
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype).train()


def close(measured: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """The same names, and numbers that rounding explains: the rotary tables are float32 in any model."""
    assert measured.keys() == expected.keys()
    for name, numbers in expected.items():
        check_rounding(torch.tensor(measured[name]), torch.tensor(numbers), dtype=torch.float32)


def by_oracle(
    model: DiffTransformerForCausalLM, tokens: Tensor, positions: Tensor | None, documents: Any, window: int | None
) -> dict[str, list[float]]:
    """The numbers from the layers' weights and inputs alone, with the equations as loops."""
    inputs, kind, statistics = (
        {},
        model.config.attention_type,
        {name: [] for name in NAMES[model.config.attention_type]},
    )
    watched = [module for layer in model.model.layers for module in (layer, layer.input_layernorm)]
    hooks = [m.register_forward_hook(lambda m, _, out: inputs.__setitem__(m, out.numpy())) for m in watched]
    with torch.no_grad():
        model(tokens, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    for number, layer in enumerate(model.model.layers, start=1):
        attention, x, logits, heads = layer.self_attn, inputs[layer.input_layernorm], [], []
        wq, wk, wv = (getattr(attention, f"{p}_proj").weight.detach().numpy() for p in "qkv")

        def split(w: Any, width: int, x: Any = x) -> Any:
            return (x @ w.T).reshape(*x.shape[:2], -1, width).swapaxes(1, 2)

        d = attention.head_dim
        positions_of_rows = [range(x.shape[1])] * len(x) if positions is None else positions.tolist()
        q, k = (np.stack(list(map(oracle.rotary, split(w, d), positions_of_rows))) for w in (wq, wk))
        v, lam = split(wv, attention.cache_width), 0.0
        if kind in PAIRED:
            vectors = [getattr(attention.lam, name).detach().numpy() for name in ("q1", "k1", "q2", "k2")]
            lam = oracle.lambda_value(*vectors, oracle.lambda_init(number))
            q, k = (y.reshape(y.shape[0], -1, n, *y.shape[2:]) for y, n in ((q, attention.ratio + 1), (k, 2)))
        elif kind == "diff_v2":
            q, k = q.reshape(q.shape[0], -1, 2, *q.shape[2:]), k[:, :, None]
            weight = attention.lambda_proj.weight.detach().numpy()
            statistics["lambda_mean"].append(np.mean(1 / (1 + np.exp(-x @ weight.T))))
        else:
            q, k = q[:, :, None].repeat(2, 2), k[:, :, None]
        for row in range(len(x)):
            cu = None if documents is None else documents[row]
            parts = q[row : row + 1], k[row : row + 1], v[row : row + 1]
            one = oracle.attention(*parts, lam, is_causal=True, window=window, cu_seqlens=cu)
            keys = parts[1].repeat(q.shape[1] // k.shape[1], 1)
            if k.shape[2] == 2:  # the first key for all queries of a group but the last
                keys = keys[:, :, [0] * (q.shape[2] - 1) + [1]]
            scores = q[row : row + 1] @ keys.swapaxes(-1, -2) / d**0.5
            logits.append(scores[np.broadcast_to(one.visible[:, :1, None], scores.shape)].max())
            heads.append(one.out)
        statistics["logit_max"].append(max(logits))
        statistics["hidden_rms"].append(np.sqrt(np.mean(inputs[layer] ** 2)))
        if kind in PAIRED:
            statistics["norm_input_rms"].append(np.sqrt(np.mean(np.square(heads))))
    return {name: [float(number) for number in numbers] for name, numbers in statistics.items()}


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str, window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped queries, odd lengths, blocks of few queries: everything that is seen counts, and nothing else."""
    model = make(kind, sliding_window=window)
    positions, documents = (POSITIONS, DOCUMENTS) if packed else (None, None)
    batch = flattened(PACKED) if packed else {"input_ids": TOKENS, "labels": TOKENS}
    expected = by_oracle(model, TOKENS, positions, documents, window)
    assert {name: len(numbers) for name, numbers in expected.items()} == dict.fromkeys(NAMES[kind], 2)
    close(measure_layers(model, batch), expected)
    monkeypatch.setattr(layer_statistics, "_SCORES", 2 * 8 * 11 * 4)  # a few queries at a time
    close(measure_layers(model, batch), expected)


def test_what_is_hidden_would_show() -> None:
    """The largest logit and the heads of these models depend on the window and on the documents."""
    plain = measure_layers(make(), {"input_ids": TOKENS})
    packed = measure_layers(make(), flattened(PACKED))
    window = measure_layers(make(sliding_window=3), {"input_ids": TOKENS})
    for name in ("logit_max", "norm_input_rms"):
        assert abs(plain[name][0] - packed[name][0]) > 0.01, name
        assert abs(plain[name][0] - window[name][0]) > 0.01, name


def state(model: nn.Module) -> Any:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return hooks, [m.training for m in model.modules()], gradients, torch.is_grad_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    """No hook, the mode of training, no gradient; also where the pass fails in its midst."""
    model = make()
    before = state(model)
    if fails:
        model.model.layers[1].mlp.down_proj.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
        with pytest.raises(RuntimeError):
            measure_layers(model, ROW)
    else:
        measure_layers(model, ROW)
    assert state(model) == before


def test_autocast() -> None:
    expected = measure_layers(make(), ROW)
    model = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        statistics = measure_layers(model, ROW)
    assert statistics != measure_layers(model, ROW)
    # bfloat16 has eps 2⁻⁷; a maximum moves by as much as one logit, a root mean square by far less.
    for name, numbers in expected.items():
        assert statistics[name] == pytest.approx(numbers, rel=8 * 2**-7), name


def gradients(model: nn.Module, rows: Tensor) -> list[float]:
    """The norm of each gradient, over all ranks' parts."""
    model.zero_grad()
    model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    parts = [parameter.grad for parameter in model.parameters()]
    return [float(p.full_tensor().norm() if hasattr(p, "full_tensor") else p.norm()) for p in parts]


def on_a_rank() -> None:
    """What all ranks find together; and gradients before and after, as training goes on."""
    rank, folder = ranks.join()
    rows, report = TOKENS[rank : rank + 1], {}
    sharded = make()
    shard(sharded, sharded.model.layers, init_device_mesh("cpu", (ranks.RANKS,)))
    for name, model in {"ddp": DistributedDataParallel(make()), "fsdp": sharded}.items():
        before = gradients(model, rows)
        report[name] = {"found": measure_layers(model, {"input_ids": rows})}
        report[name] |= {"before": before, "after": gradients(model, rows)}
    (folder / f"report {rank}").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


@pytest.mark.all
def test_two_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    """The whole batch's numbers, of half the batch each; and training goes on undisturbed."""
    ranks.run(__file__, tmp_path)
    first, second = (json.loads((tmp_path / f"report {rank}").read_text()) for rank in range(ranks.RANKS))
    expected = measure_layers(make(), {"input_ids": TOKENS})
    for report in (first, second):
        for one in report.values():
            close(one["found"], expected)
            assert one["after"] == one["before"]
            assert min(one["after"]) > 0


if __name__ == "__main__":
    on_a_rank()
