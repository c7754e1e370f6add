"""A model spread by `diff_transformer.parallel` gives the loss and the gradients of one process, in float64.

The ranks run this file as a script: each layout of its own process groups, one after another.
"""

import inspect
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import distributed as transformers_distributed

import ranks
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, DiffTransformerModel
from diff_transformer.model.parallel_plan import SumGradient
from diff_transformer.parallel import Context, Messages, context_parallel, one_rank_of, shard, tensor_parallel
from tiny_model import FORMS, make, name_of_form, sizes_for
from tiny_model import check_rounding as check

LENGTH, ROWS = 32, 4
DOCUMENTS = [0, 5, 9, 26, LENGTH]  # of the first row
SIZES = {"vocab_size": 32, "max_position_embeddings": LENGTH}
PROMPTS = torch.arange(1, 19).view(2, 9)
HAS_PIPELINE = "pp_size" in inspect.signature(transformers_distributed.DistributedConfig).parameters
# By the number of ranks: sizes of a mesh, and settings.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "FSDP2": {"dp": 2},
        "TP": {"tp": 2},
        "TP with sequence parallelism": {"tp": 2, "sequence": True},
        "TP with sequence parallelism, documents": {"tp": 2, "sequence": True, "documents": True},
        "CP": {"cp": 2},
        "CP, documents": {"cp": 2, "documents": True},
        "CP, window": {"cp": 2, "window": 3},
    },
    4: {
        "HSDP": {"replicas": 2, "dp": 2},
        "FSDP2 and TP": {"dp": 2, "tp": 2},
        "FSDP2 and TP with sequence parallelism": {"dp": 2, "tp": 2, "sequence": True},
        "TP and CP, documents": {"cp": 2, "tp": 2, "sequence": True, "documents": True},
        "FSDP2 and CP, documents": {"dp": 2, "cp": 2, "documents": True},
        "FSDP2 and TP, compiled layers": {"dp": 2, "tp": 2, "sequence": True, "compiled": True},
        "CP 4, documents": {"cp": 4, "documents": True},
    },
}


# Those of `make test`.
FEW_FORMS = ("diff", "diff_grouped λ of tokens")
each_form = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(form, id=name, marks=() if name in FEW_FORMS else pytest.mark.all)
        for form, name in ((form, name_of_form(form)) for form in FORMS)
    ],
)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the token after each, and positions."""
    tokens = torch.randint(1, SIZES["vocab_size"], (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1], tokens[:, 1:], torch.arange(LENGTH).expand(ROWS, -1)


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """The first row, as documents."""
    tokens, labels, _ = (x[:1] for x in batch())
    lengths = torch.tensor(DOCUMENTS).diff()
    return tokens, labels, torch.cat([torch.arange(int(length)) for length in lengths])[None]


def answers(model: Any, data: tuple[Tensor, Tensor, Tensor], **kwargs: Any) -> Any:
    """The loss and every gradient."""
    tokens, labels, positions = data
    logits = model(tokens, position_ids=positions, use_cache=False, **kwargs).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return {"loss": loss.detach()} | {name: whole(p.grad).contiguous() for name, p in model.named_parameters()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def takes(form: str, layout: dict[str, Any]) -> bool:
    """Whether a layout is tried with an attention type: compilation takes seconds, so with one."""
    if form == "gdla" and "tp" in layout:
        return False
    return form == "diff" if layout.get("compiled") else form != "softmax" or "cp" not in layout


def names_in(folder: Path) -> list[str]:
    """The attention types that are asked for."""
    return [name for name in map(name_of_form, FORMS) if (folder / name).is_dir()]


def spread_answers(model: Any, layout: dict[str, Any]) -> dict[str, Tensor]:
    replicas, dp, cp, tp = (layout.get(name, 1) for name in ("replicas", "dp", "cp", "tp"))
    mesh = init_device_mesh("cpu", (replicas, dp, cp, tp), mesh_dim_names=("replicas", "dp", "cp", "tp"))
    layers = model.model.layers
    kwargs: dict[str, Any] = {}
    data = packed() if layout.get("documents") else batch()
    if cp > 1:
        documents = DOCUMENTS if layout.get("documents") else None
        context = Context(mesh["cp"], LENGTH, documents)
        context_parallel(layers)
        kwargs["context"], data = context, tuple(context.own(x) for x in data)
    if tp > 1:
        parts = {"embedding": model.model.embed_tokens, "norm": model.model.norm, "head": model.lm_head}
        tensor_parallel(layers, mesh["tp"], **parts, sequence_parallel=layout.get("sequence", False))
    for layer in layers if layout.get("compiled") else ():
        layer.compile(backend="aot_eager")
    # The ranks of a sequence share its gradients as those of a batch do.
    divided = mesh["dp", "cp"]._flatten("divided") if dp * cp > 1 else None
    if divided is not None:
        shard(model, layers, mesh["replicas", "divided"] if replicas > 1 else divided)
        row = mesh["replicas"].get_local_rank() * dp + mesh["dp"].get_local_rank()
        data = data if layout.get("documents") else tuple(x.chunk(replicas * dp)[row] for x in data)
    result = answers(model, data, **kwargs)
    loss = result["loss"]
    torch.distributed.all_reduce(loss)  # every rank's, those with the same rows too
    result["loss"] = loss / torch.distributed.get_world_size()
    return result


def generate(model: DiffTransformerForCausalLM) -> Tensor:
    mask = torch.ones_like(PROMPTS)
    return model.generate(PROMPTS, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)


def in_a_pipeline(rank: int, folder: Path) -> None:
    """transformers' own pipeline of two ranks: logits, and greedy tokens."""
    plan = transformers_distributed.DistributedConfig(pp_size=2)
    for kind in names_in(folder):
        model = DiffTransformerForCausalLM.from_pretrained(folder / kind, dtype=torch.float64, distributed_config=plan)
        layers = [name for name, _ in model.named_parameters() if name.endswith("q_proj.weight")]
        assert layers == [f"model.layers.{rank}.self_attn.q_proj.weight"]
        with torch.no_grad():
            found = {"logits": model(PROMPTS).logits, "tokens": generate(model)}
        save_file({name: value.contiguous() for name, value in found.items()}, folder / f"{kind} {rank}.safetensors")


# What an engine takes that does not know the names of a plan: those of a Llama.
_QKV = ("q_proj", "k_proj", "v_proj")
_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
LLAMAS: dict[str, ParallelStyle] = {
    **{f"model.layers.*.{name}": ColwiseParallel() for name in _COLUMNS},
    **{f"model.layers.*.{name}": RowwiseParallel() for name in _ROWS},
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def by_a_foreign_plan(model: Any) -> dict[str, Any]:
    """Logits, or what is said instead, and what training says: with λ and the norms of heads whole on every rank."""
    parallelize_module(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), LLAMAS)
    found: dict[str, Any] = {}
    for name in ("logits", "training"):
        try:
            with torch.set_grad_enabled(name == "training"):
                found[name] = model(PROMPTS, use_cache=False).logits.tolist()
        except ValueError as error:
            found[name] = str(error)
    for layer in model.model.layers:  # what is not trained needs no sum
        for part in (layer.self_attn.head_norm, getattr(layer.self_attn, "lam", None)):
            if part is not None:
                part.requires_grad_(False)
    if not isinstance(found["logits"], str):
        found["frozen"] = model(PROMPTS, use_cache=False).logits.tolist()
    return found


def on_a_rank() -> None:
    rank, folder = ranks.join()
    # Gathered logits are a view, which nothing here changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # which torch.compile reads
    warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)  # of the replicas' mesh, below
    for form in names_in(folder):
        for name, layout in LAYOUTS[torch.distributed.get_world_size()].items():
            if not takes(form, layout):
                continue
            window = {"sliding_window": layout["window"]} if "window" in layout else {}
            model = DiffTransformerForCausalLM.from_pretrained(folder / form, dtype=torch.float64, **window)
            result = spread_answers(model, layout)
            if rank == 0:
                save_file(result, folder / f"{form}, {name}.safetensors")
        if torch.distributed.get_world_size() == 2:
            found = by_a_foreign_plan(DiffTransformerForCausalLM.from_pretrained(folder / form, dtype=torch.float64))
            (folder / f"{form}, foreign {rank}.json").write_text(json.dumps(found))
    if HAS_PIPELINE and torch.distributed.get_world_size() == 2:
        in_a_pipeline(rank, folder)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.all)])
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder in which the ranks have written what they found, and their number."""
    folder = tmp_path_factory.mktemp("ranks")
    for form in FORMS:
        if request.config.getoption("--all") or name_of_form(form) in FEW_FORMS:
            make(form, **SIZES).save_pretrained(folder / name_of_form(form))
    ranks.run(__file__, folder, request.param)
    return folder, request.param


@each_form
def test_ranks_give_what_one_process_gives(kind: str, spread: tuple[Path, int]) -> None:
    folder, count = spread
    for layout, settings in LAYOUTS[count].items():
        file = folder / f"{name_of_form(kind)}, {layout}.safetensors"
        if not takes(name_of_form(kind), settings):
            continue
        computed = load_file(file)
        window = {"sliding_window": settings["window"]} if "window" in settings else {}
        expected = answers(make(kind, **SIZES, **window), packed() if settings.get("documents") else batch())
        assert computed.keys() == expected.keys()
        largest = max(value.abs().max().item() for value in expected.values())
        for name, value in expected.items():
            assert value.abs().max() > 0, name
            check(computed[name], value, least=largest)


@each_form
def test_an_engine_that_does_not_know_lambda_breaks_nothing_silently(kind: str, spread: tuple[Path, int]) -> None:
    """With a plan of a Llama's names, on two ranks: it computes what one process does, or says what is wrong."""
    folder, count = spread
    for rank in range(count if count == 2 else 0):
        found = json.loads((folder / f"{name_of_form(kind)}, foreign {rank}.json").read_text())
        expected = make(kind, **SIZES)(PROMPTS).logits
        if make(kind, **SIZES).config.has_token_lambda:
            assert found["training"].startswith("this rank has ")
            refusal = "of 8 query heads: latents" if kind == "gdla" else "heads and λ of .: a plan .* must split W_λ"
            assert re.search(rf"this rank has \d {refusal}", found["logits"])
            continue
        check(torch.tensor(found["logits"], dtype=torch.float64), expected)
        check(torch.tensor(found["frozen"], dtype=torch.float64), expected)
        if kind == "softmax":  # whose heads share nothing
            check(torch.tensor(found["training"], dtype=torch.float64), expected)
        else:
            assert "its part of the gradient of 'lam' that nobody adds to the others" in found["training"]


@each_form
@pytest.mark.skipif(not HAS_PIPELINE, reason="this release of transformers declares pipelines and does not run them")
def test_a_pipeline_gives_what_one_process_gives(kind: str, spread: tuple[Path, int]) -> None:
    folder, count = spread
    model = make(kind, **SIZES)
    for rank in range(count if count == 2 else 0):
        found = load_file(folder / f"{name_of_form(kind)} {rank}.safetensors")
        check(found["logits"], model(PROMPTS).logits)
        assert torch.equal(found["tokens"], generate(model))


def test_the_pipeline_s_plan_is_llamas(kind: str) -> None:
    """Whatever splits a Llama by its plan finds the same names and the same inputs and outputs here."""
    model, llama = make(kind), LlamaForCausalLM(LlamaConfig(**{**sizes_for("softmax"), "num_noise_heads": None}))
    assert type(model)._pp_plan == LlamaForCausalLM._pp_plan
    assert model.pp_plan == llama.pp_plan
    assert model.model.pp_plan == llama.model.pp_plan
    assert model.config.base_model_pp_plan == LlamaConfig.base_model_pp_plan
    assert all(isinstance(model.get_submodule(name), torch.nn.Module) for name in model.pp_plan)
    assert "base_model_pp_plan" not in model.config.to_dict()


def test_models_that_have_no_context_parallelism() -> None:
    with pytest.raises(ValueError, match="differential attention, got 'softmax' and is_causal True"):
        context_parallel(make("softmax").model.layers)
    config = DiffTransformerConfig(**sizes_for("diff"), is_causal=False)
    with pytest.raises(ValueError, match="got 'diff' and is_causal False"):
        context_parallel(DiffTransformerModel(config).layers)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="cannot have rope_type 'dynamic'"):
        context_parallel(make("diff", rope_parameters=dynamic).model.layers)


@pytest.mark.parametrize("name", ["attention_mask", "cu_seq_lens_q", "output_attentions", "context", "length"])
def test_what_context_parallelism_would_ignore_is_refused(name: str) -> None:
    model, ids = make("diff"), torch.arange(1, 9)[None]
    with one_rank_of(1):
        context = Context(init_device_mesh("cpu", (1,)), 8)
        context_parallel(model.model.layers)
        given: dict[str, Any] = {"position_ids": torch.arange(8)[None], "context": context, "use_cache": False}
        wrong = {"attention_mask": torch.tensor([[0, 1] * 4]), "cu_seq_lens_q": torch.tensor([0, 8])}
        wrong |= {"output_attentions": True, "context": None, "length": None}
        ids = ids[:, :6] if name == "length" else ids
        given |= {"position_ids": torch.arange(6)[None]} if name == "length" else {name: wrong[name]}
        with pytest.raises(ValueError, match=r"parallelism needs context|of 8 tokens, got 6"):
            model(ids, **given)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_ranks_part_of_a_sequence_is_not_shifted_in_itself(chunked: bool) -> None:
    model, ids = make("diff"), torch.arange(1, 9)[None]
    with one_rank_of(1):
        context = Context(init_device_mesh("cpu", (1,)), 8)
        context_parallel(model.model.layers)
        given: dict[str, Any] = {"context": context, "use_cache": False, "labels": ids, "chunked_loss": chunked}
        with pytest.raises(ValueError, match=r"position_ids must be given: this rank's, by Context\.own"):
            model(ids, **given)
        given["position_ids"] = torch.arange(8)[None]
        with pytest.raises(ValueError, match="as shift_labels beside labels"):
            model(ids, **given)
        shifted = F.pad(ids, (0, 1), value=-100)[:, 1:]
        loss, expected = model(ids, **given, shift_labels=shifted).loss, make("diff")(ids, labels=ids).loss
        torch.testing.assert_close(loss.float(), expected.float())


def test_a_feed_forward_network_that_the_ranks_cannot_share() -> None:
    with one_rank_of(2), pytest.raises(ValueError, match="2 ranks cannot share intermediate_size 21 evenly"):
        tensor_parallel(make("diff", intermediate_size=21).model.layers, init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize(
    ("kind", "left_out", "split"),
    [
        *((kind, name, _QKV) for kind, name in (("diff", "lam"), ("diff_grouped", "lam"), ("softmax", "head_norm"))),
        ("diff", "lam", _QKV[:1]),  # one head of keys stays whole
    ],
)
def test_a_plan_that_leaves_out_what_heads_share_has_no_gradients(
    kind: str, left_out: str, split: tuple[str, ...]
) -> None:
    """Llama's plan, which another engine takes by itself; it is enough to generate with."""
    model = make(kind, headwise_norm=True, num_key_value_heads=4 if split == _QKV else 2)
    tokens = torch.arange(1, 9)[None]
    plan: dict[str, ParallelStyle] = dict.fromkeys(split, ColwiseParallel())
    with one_rank_of(2):
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            parallelize_module(layer.self_attn, mesh, plan | {"o_proj": RowwiseParallel()})
        for training in (False, True):
            with torch.no_grad():
                assert model.train(training)(tokens).logits.shape[:2] == (1, 8)
            with pytest.raises(ValueError, match=f"^this rank has 4 of 8 query heads, and .* of '{left_out}' that"):
                model(tokens)


@pytest.mark.parametrize(("left", "keys"), [(("q_proj", "lambda_proj"), 4), (("k_proj", "v_proj"), 2)])
def test_queries_that_would_meet_keys_of_others_are_refused(left: tuple[str, ...], keys: int) -> None:
    model, queries = make("diff_v2"), 8 if keys == 4 else 16
    with one_rank_of(2):
        parallelize_module(
            model.model.layers[0].self_attn, init_device_mesh("cpu", (2,)), dict.fromkeys(left, ColwiseParallel())
        )
        with pytest.raises(ValueError, match=rf"^this rank has {queries} query heads and {keys} key heads, to which"):
            model(torch.arange(1, 9)[None])


def test_a_step_sends_no_message_for_a_lambda() -> None:
    """FSDP2 on one of 64 ranks: two gathers a layer, one for the rest, and a scattered sum for each unit."""
    layers = 2
    config = DiffTransformerConfig(**sizes_for("diff", num_hidden_layers=layers, hidden_size=256))
    with one_rank_of(64):
        with torch.device("meta"):
            model = DiffTransformerForCausalLM(config)
        names = [name for name, _ in model.named_parameters()]
        mesh = init_device_mesh("cpu", (64,))
        shard(model, model.model.layers, mesh, param_dtype=torch.bfloat16)
        assert [name for name, _ in model.named_parameters()] == names
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            tokens = torch.zeros(1, 16, dtype=torch.long)
            with Messages() as messages, torch.autocast("cpu", dtype=torch.bfloat16):
                model(tokens, labels=tokens, use_cache=False).loss.backward()
    gathered, scattered = messages.count["allgather", 64], messages.count["reduce_scatter", 64]
    assert (gathered, scattered) == (2 * layers + 1, layers + 1)


def test_a_sequence_that_the_ranks_cannot_share() -> None:
    with one_rank_of(4):
        mesh = init_device_mesh("cpu", (4,))
        with pytest.raises(ValueError, match="4 ranks share a multiple of 8 tokens, got 12"):
            Context(mesh, 12)
        with pytest.raises(ValueError, match=r"end at the length 16, got \[0, 5, 3, 16\]"):
            Context(mesh, 16, [0, 5, 3, 16])
        model, ids = make("diff", num_attention_heads=16, num_key_value_heads=8), torch.arange(1, 7)[None]
        tensor_parallel(model.model.layers, mesh, embedding=model.model.embed_tokens, sequence_parallel=True)
        with pytest.raises(ValueError, match="sequence_parallel shares a multiple of 4 tokens, got 6"):
            model(ids, position_ids=ids)


def test_transformers_plan_adds_the_ranks_gradients_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backward pass by itself; tests/model/test_tensor_parallel.py has two ranks, with --all."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda gradient, group: gradient.mul_(3))  # of three alike
    weight = torch.ones(2, requires_grad=True)
    for passes in (1, 2):
        SumGradient.apply(weight, None).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0 * passes] * 2


if __name__ == "__main__" and len(sys.argv) > 1:
    on_a_rank()
