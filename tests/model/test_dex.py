"""attention_type "dex": the exact start from a Llama, every implementation, the state of the annealing, training."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.dex_annealing import DexAnnealing
from diff_transformer.nn import AnnealedLambda, DexCorrection
from loss_weighting import QUIET_ON_CPU
from tiny_model import SIZES, make, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("accelerate_afresh")

# An odd number of key/value heads, as no DIFF model may have.
MODEL: dict[str, Any] = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
SOME = [[0, 4], [5]]


def llama(implementation: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, attn_implementation=implementation)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def retrofitted(source: LlamaForCausalLM, implementation: str = "sdpa", **config: Any) -> DiffTransformerForCausalLM:
    """The source's weights, W_D = 0 and λ_learn = λ_init."""
    settings = DiffTransformerConfig(**MODEL, attention_type="dex", attn_implementation=implementation, **config)
    model = DiffTransformerForCausalLM(settings).eval()
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected
    assert all(".dex." in name for name in missing)
    assert len(missing) == 6
    return model


@pytest.mark.parametrize("heads", [None, SOME], ids=["all heads", "some heads"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_start_is_llama_to_the_last_bit(implementation: str, heads: Any, ran: Counter[str]) -> None:
    source = llama(implementation)
    model, inputs = retrofitted(source, implementation, dex_heads=heads), tokens(length=17)
    expected = source(inputs).logits
    ran.clear()
    for progress in (0, 0.01, 0.5, 1):
        model.set_dex_progress(progress)
        assert torch.equal(model(inputs).logits, expected)
    assert ran == {"eager" if implementation == "eager" else "torch": 2 * 4}
    corrections = [module for module in model.modules() if isinstance(module, DexCorrection)]
    assert [module.heads for module in corrections] == [tuple(range(6))] * 2 if heads is None else [(0, 4), (5,)]
    for module in corrections:
        torch.nn.init.normal_(module.weight)
    assert (model(inputs).logits - expected).abs().max() > 0.01


@pytest.mark.parametrize("heads", [None, [[1], [0, 3, 7]]], ids=["all heads", "some heads"])
@pytest.mark.parametrize("implementation", ["sdpa", "diff_attention", "diff_attention_blockwise"])
def test_every_implementation(implementation: str, heads: Any, ran: Counter[str]) -> None:
    """Outputs and the gradients of all parameters are eager's, whose softmax is a float32 one."""
    inputs, answers = tokens(), []
    for name in ("eager", implementation):
        model = make("dex", dex_heads=heads, attn_implementation=name)
        model.set_dex_progress(0.6)
        ran.clear()
        logits = model(inputs).logits
        assert ran == {"eager" if name == "eager" else "torch": 2}  # ours leaves a layer of one map to torch
        logits.square().mean().backward()
        answers.append({"logits": logits} | {name: parameter.grad for name, parameter in model.named_parameters()})
    expected, answer = answers
    for name, value in expected.items():
        assert value.abs().max() > 1e-6, name
        check(answer[name], value, dtype=torch.float32)


def test_caches_and_generation() -> None:
    model, inputs = make("dex"), tokens(length=5)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(inputs, use_cache=False, **settings)
    assert torch.equal(model.generate(inputs, **settings), expected)
    assert torch.equal(model.generate(inputs, cache_implementation="static", **settings), expected)
    plain = make("softmax")
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if ".dex." not in key})
    assert not torch.equal(plain.generate(inputs, **settings), expected)


def annealing_of(model: torch.nn.Module) -> list[tuple[float, float, torch.dtype]]:
    """α, λ_learn and λ's dtype of each layer."""
    parts = [module for module in model.modules() if isinstance(module, AnnealedLambda)]
    return [(part.progress.item(), part.learned.item(), part().dtype) for part in parts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_saved_and_loaded(dtype: str, tmp_path: Path) -> None:
    """λ_learn and α come back as they were, in float32 whatever the model's dtype; the chosen heads are chosen."""
    model, inputs = retrofitted(llama(), dex_heads=SOME).to(getattr(torch, dtype)), tokens()
    for module in model.modules():
        if isinstance(module, DexCorrection):
            torch.nn.init.normal_(module.weight)
            torch.nn.init.constant_(module.lam.learned, 1 / 3)
    model.set_dex_progress(0.1)
    expected = [(0.10000000149011612, 0.3333333432674408, torch.float32)] * 2
    assert annealing_of(model) == expected
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="sdpa")
    assert annealing_of(loaded) == expected
    assert loaded.config.dex_heads == SOME
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype), torch.float32}
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)


def test_a_llama_checkpoint_gets_its_first_numbers(tmp_path: Path, caplog: Any) -> None:
    """Loading fills in what a checkpoint lacks: no parameter is left as the memory happened to be."""
    source, inputs = llama(), tokens()
    source.save_pretrained(tmp_path)
    config = DiffTransformerConfig(**MODEL, attention_type="dex", dex_heads=SOME, dex_lambda_start=0.25)
    model, report = DiffTransformerForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="sdpa", output_loading_info=True
    )
    assert len(report["missing_keys"]) == 6
    assert annealing_of(model) == [(1.0, 0.25, torch.float32)] * 2
    assert [list(m.heads) for m in model.modules() if isinstance(m, DexCorrection)] == SOME
    assert torch.equal(model(inputs).logits, source(inputs).logits)


def text() -> list[dict[str, Tensor]]:
    """Sequences that can be learned: each token follows from the last."""
    rows = [torch.arange(start, start + 10) * 3 % 28 + 1 for start in range(8)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(model: Any, folder: Path, steps: int, annealing: DexAnnealing, **arguments: Any) -> Trainer:
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8 // arguments.get("gradient_accumulation_steps", 1),
        max_steps=steps,
        learning_rate=0.01,
        save_steps=3,
        **QUIET_ON_CPU,
        **arguments,
    )
    return Trainer(model=model, args=settings, train_dataset=text(), callbacks=[annealing])


def losses(of: Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


def test_fine_tuning_goes_on_from_the_source(tmp_path: Path) -> None:
    """The first loss is the source's, W_D moves from the first step on, the loss falls; a resumed run is the same."""
    source, model = llama(), retrofitted(llama(), dex_heads=SOME)
    batch = {name: torch.stack([row[name] for row in text()]) for name in ("input_ids", "labels")}
    expected = source(**batch).loss.item()
    run = trainer(model, tmp_path / "whole", 6, DexAnnealing())
    run.train()
    assert losses(run)[0] == pytest.approx(expected, rel=1e-6)
    assert losses(run)[-1] < losses(run)[0] - 0.1
    assert all(progress == 1 for progress, _, _ in annealing_of(model))
    assert all(module.weight.abs().min() > 0 for module in model.modules() if isinstance(module, DexCorrection))
    assert all(learned != 0.2 for _, learned, _ in annealing_of(model))

    half = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-3", attn_implementation="sdpa")
    assert [progress for progress, _, _ in annealing_of(half)] == [0.5, 0.5]
    assert all(module.weight.any() for module in half.modules() if isinstance(module, DexCorrection))
    resumed = trainer(retrofitted(llama(), dex_heads=SOME), tmp_path / "whole", 6, DexAnnealing())
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    torch.testing.assert_close(resumed.model.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("steps", "expected"), [(None, [0.25, 0.5, 0.75, 1.0]), (2, [0.5, 1.0, 1.0, 1.0])])
def test_annealing_of_each_step(steps: int | None, expected: list[float], tmp_path: Path) -> None:
    """Before the forward pass of step t, α is t / T; accumulation does not count twice."""
    model, seen = retrofitted(llama()), []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(annealing_of(model)[0][0]))
    trainer(model, tmp_path, 4, DexAnnealing(steps), gradient_accumulation_steps=2).train()
    assert seen[::2] == seen[1::2] == expected


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'dex'.*λ.*'softmax'\.$"):
        make("softmax").set_dex_progress(0.5)
    with pytest.raises(ValueError, match=r"^steps must be 1 or more, got 0\.$"):
        DexAnnealing(0)
    with pytest.raises(ValueError, match=r"DiffTransformerForCausalLM .*λ.*'dex'.*\.$"):
        trainer(make("diff", torch.float32), tmp_path, 1, DexAnnealing()).train()
    with pytest.raises(ValueError, match=r"tensor parallelism .*'dex'.* 2 ranks"):
        make("dex")._tp_size = 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dex_heads": [[0]]}, "dex_heads must be one list of heads for each of the 2 layers"),
        ({"dex_heads": [0, 1]}, "dex_heads must be one list of heads for each of the 2 layers"),
        (
            {"dex_heads": [[0], [6]]},
            r"dex_heads of layer 1, .*: chosen heads must be ascending numbers in 0 … 5, got 6",
        ),
        ({"dex_heads": [[], []]}, "dex_heads must name one head or more, got empty lists only"),
        ({"dex_lambda_start": float("nan")}, "dex_lambda_start must be a finite number, got nan"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):  # transformers wraps the ValueError in a class of its own
        DiffTransformerConfig(**MODEL, attention_type="dex", **settings)
