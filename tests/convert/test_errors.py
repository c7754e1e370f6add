"""Bad input: one sentence that names what was found, before anything is written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DiffLlamaForCausalLM, LlamaForCausalLM

from diff_transformer.convert import convert_from, convert_to

Folder = Callable[..., Path]
Refuses = Callable[..., None]


@pytest.fixture(autouse=True)
def _writes_nothing(tmp_path: Path) -> Iterator[None]:
    yield
    assert {file.name for file in tmp_path.iterdir()} <= {"ours", "theirs"}


@pytest.fixture
def refuses(tmp_path: Path) -> Refuses:
    """(pattern, error, function, layout, source, **options) → fails unless that error is raised, in one line."""

    def refuses(pattern: str, convert: Callable[..., Any], layout: str, source: Path, **options: Any) -> None:
        with pytest.raises((ValueError, OSError), match=pattern) as caught:
            convert(layout, source, tmp_path / "new", **options)
        assert "\n" not in str(caught.value)
        # The command line shows a ValueError of this package as a sentence, and any other as a bug.
        if caught.type is ValueError:
            assert caught.traceback[-1].frame.f_globals["__name__"].startswith("diff_transformer.")

    return refuses


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def edit_settings(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**settings, **changes}), encoding="utf-8")


def test_keys_and_shapes_are_all_listed(theirs: Folder, refuses: Refuses) -> None:
    source = theirs(LlamaForCausalLM)

    def change(weights: dict[str, Tensor]) -> None:
        weights["model.layers.3.mlp.up_proj.weight"] = weights.pop("model.layers.2.mlp.up_proj.weight")
        weights["score.weight"] = torch.zeros(2)
        weights["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(8, 32)

    edit_weights(source, change)
    refuses(
        r"theirs' do not fit the layout 'llama': unknown: model\.layers\.3\.mlp\.up_proj\.weight, score\.weight; "
        r"missing: model\.layers\.2\.mlp\.up_proj\.weight; "
        r"wrong shapes: model\.layers\.1\.self_attn\.k_proj\.weight is \(8, 32\), not \(16, 32\)\.",
        convert_from,
        "llama",
        source,
    )


@pytest.mark.parametrize(
    ("weights", "pattern"),
    [
        ({f"x{i:02}": torch.zeros(1) for i in range(30)}, r"unknown: x00, .*x19 and 10 more\."),
        (
            {"model.norm.weight": torch.zeros(32, dtype=torch.int8)},
            r"Only F64, F32, F16, BF16 weights .*model\.norm\.weight \(I8\)",
        ),
    ],
    ids=["very many keys", "integers"],
)
def test_weights_of_another_kind(weights: dict[str, Tensor], pattern: str, theirs: Folder, refuses: Refuses) -> None:
    source = theirs(LlamaForCausalLM)
    edit_weights(source, lambda theirs: theirs.update(weights))
    refuses(pattern, convert_from, "llama", source)


def test_ours_must_be_whole(ours: Folder, refuses: Refuses) -> None:
    """What other layouts may lack, ours may not."""
    source = ours("diff")
    names = [f"model.layers.{layer}.self_attn.head_norm.weight" for layer in range(3)]
    edit_weights(source, lambda weights: [weights.pop(name) for name in names])
    refuses(r"do not fit the layout ours: missing: .*0\.self_attn\.head_norm", convert_to, "microsoft", source)


def test_what_may_be_missing_elsewhere_is_missed(authors: Folder, refuses: Refuses) -> None:
    """A norm weight is in all layers or in none, and an output head may be left out where it is tied."""
    source = authors(num_heads=4, num_kv_heads=2)
    edit_weights(source, lambda weights: weights.pop("model.layers.1.self_attn.subln.weight"))
    refuses(r"missing: model\.layers\.1\.self_attn\.subln\.weight\.", convert_from, "microsoft", source)
    edit_weights(source, lambda weights: weights.pop("lm_head.weight"))
    refuses(r"missing: .*lm_head\.weight", convert_from, "microsoft", source)


@pytest.mark.parametrize(
    ("layout", "model", "changes", "pattern"),
    [
        ("llama", LlamaForCausalLM, {"mlp_bias": True}, "mlp_bias must be False"),
        ("llama", LlamaForCausalLM, {"hidden_act": "gelu"}, "hidden_act must be 'silu', because .*; got 'gelu'"),
        ("llama", LlamaForCausalLM, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be"),
        ("llama", LlamaForCausalLM, {"num_key_value_heads": 1}, "must be even .*8 and 1"),
        ("llama", LlamaForCausalLM, {"num_attention_heads": 0}, "such as num_attention_heads, is 0"),
        ("llama", LlamaForCausalLM, {"is_causal": False}, "is_causal must be True, because only models that predict"),
        ("llama", LlamaForCausalLM, {"num_hidden_layers": 10**9}, r"there are \d+ tensors for num_hidden_layers 10{9}"),
        (
            "llama",
            LlamaForCausalLM,
            {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
            r"config\.json' cannot be converted: .*rope_theta must be a finite number above 0, got '1e4'",
        ),
        ("llama", LlamaForCausalLM, {"rms_norm_eps": "small"}, r"config\.json' cannot be converted: .*rms_norm_eps"),
        ("llama", LlamaForCausalLM, {"vocab_size": 7}, r"embed_tokens\.weight is \(29, 32\), not \(7, 32\)"),
        ("diffllama", DiffLlamaForCausalLM, {"attention_bias": True}, "attention_bias must be False, .* not covered"),
        ("diffllama", DiffLlamaForCausalLM, {"attention_dropout": 0.1}, "attention_dropout must be 0, .* not covered"),
        ("diffllama", DiffLlamaForCausalLM, {"model_type": "llama"}, "model_type must be 'diffllama', got 'llama'"),
        ("microsoft", None, {"num_heads": None}, "num_heads must be a whole number, 1 or more, got None"),
        (
            "microsoft",
            None,
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "are both given",
        ),
        ("microsoft", None, {"num_heads": 3}, r"hidden_size must be a multiple of 2·num_heads, got 32 and 3"),
        ("microsoft", None, {"num_heads": 8}, r"lambda_k1 is \(4,\), not \(2,\)"),  # not halved
        ("microsoft", None, {"num_attention_heads": 8}, "unknown: num_attention_heads"),
        ("microsoft", None, {"attention_bias": True, "dropout": 0.1}, "unknown: attention_bias, dropout"),
        ("microsoft", None, {"first_depth": 0.5}, "cannot be converted: .*lambda_init_offset"),
    ],
)
def test_settings_that_ours_cannot_have(
    layout: str, model: Any, changes: dict[str, Any], pattern: str, theirs: Folder, authors: Folder, refuses: Refuses
) -> None:
    source = theirs(model) if model else authors(num_heads=4, num_kv_heads=2)
    edit_settings(source, **changes)
    refuses(pattern, convert_from, layout, source)


@pytest.mark.parametrize("attention_type", ["diff_v2", "dex"])
@pytest.mark.parametrize(("name", "value"), [("attention_bias", True), ("attention_dropout", 0.1)])
def test_options_that_only_softmax_takes_from_a_llama(
    name: str, value: float, attention_type: str, theirs: Folder, refuses: Refuses
) -> None:
    source = theirs(LlamaForCausalLM, **{name: value})
    refuses(f"{name} must be .* not covered; got {value}", convert_from, "llama", source, attention_type=attention_type)


def test_settings_that_the_authors_layout_needs(authors: Folder, refuses: Refuses) -> None:
    source = authors(num_heads=4, num_kv_heads=2)
    (source / "config.json").write_text('{"hidden_size": 32, "vocab_size": 29}', encoding="utf-8")
    refuses("missing: intermediate_size, num_hidden_layers, num_heads", convert_from, "microsoft", source)


@pytest.mark.parametrize(
    ("kind", "layout", "config", "pattern"),
    [
        ("diff", "llama", {}, "one kind of attention, our 'softmax'.* no place for .* of a 'diff' model"),
        ("diff_v2", "microsoft", {}, "one kind of attention, our 'diff',"),
        ("diff", "diffllama", {"lambda_init": 0.8}, r"cannot hold lambda_init 0\.8 \(it would become 'schedule'\)"),
        ("diff", "diffllama", {"lambda_init_offset": 1}, "cannot hold lambda_init_offset 1"),
        ("diff", "microsoft", {"rms_norm_eps": 1e-6}, "norm_eps_in_attention 1e-06 .*would become 1e-05"),
        ("diff", "diffllama", {"hidden_act": "poly_norm"}, "cannot hold hidden_act 'poly_norm'"),
        ("diff", "microsoft", {"head_dim": 8}, "cannot hold head_dim 8 .*would become 4"),
        ("softmax", "llama", {"hidden_size": 20}, "hidden size .*20.* not a multiple"),
        ("diff", "diffllama", {"sliding_window": 5}, "'diffllama' cannot hold sliding_window 5"),
        ("diff", "diffllama", {"attention_bias": True}, "'diffllama' cannot hold attention_bias True"),
        ("diff", "microsoft", {"attention_dropout": 0.1}, "cannot hold attention_dropout 0.1 .*would become 0.0"),
        ("softmax", "llama", {"headwise_norm": True}, "'llama' cannot hold headwise_norm True"),
        ("diff", "microsoft", {"headwise_norm": False}, "'microsoft' cannot hold headwise_norm False"),
        ("diff_v2", "microsoft-v2", {"headwise_norm": True}, "'microsoft-v2' cannot hold headwise_norm True"),
        ("softmax", "llama", {"qk_norm": True}, "'llama' cannot hold qk_norm True"),
        ("softmax", "llama", {"output_gate": True}, "'llama' cannot hold output_gate True"),
        ("diff", "motif", {}, "hidden_act must be 'poly_norm'"),
        ("diff", "motif", {"hidden_act": "poly_norm"}, "cannot hold lambda_init_offset 0"),
        ("diff_grouped", "motif", {"num_noise_heads": 2}, "one kind of attention, our 'diff'"),
        (
            "diff_grouped",
            "motif-2",
            {"num_noise_heads": 2, "hidden_act": "poly_norm", "token_lambda": True, "lambda_init_offset": -1},
            "cannot hold token_lambda True",
        ),
    ],
)
def test_models_that_the_layout_cannot_hold(
    kind: str, layout: str, config: dict[str, Any], pattern: str, ours: Folder, refuses: Refuses
) -> None:
    refuses(pattern, convert_to, layout, ours(kind, **config))


def test_folders_that_are_none(tmp_path: Path, theirs: Folder, refuses: Refuses) -> None:
    refuses("'.*nowhere' is no folder", convert_from, "llama", tmp_path / "nowhere")
    source = theirs(LlamaForCausalLM)
    refuses("model.safetensors' is no folder", convert_to, "llama", source / "model.safetensors")
    pickled = (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refuses(r"are pickled \(pytorch_model\.bin\), and a pickle can run any code", convert_from, "llama", source)
    pickled.unlink()
    refuses("holds no weights: neither", convert_from, "llama", source)
    (source / "config.json").write_text("[1]", encoding="utf-8")
    refuses("must hold a JSON object, got list", convert_from, "llama", source)
    (source / "config.json").write_text("{", encoding="utf-8")
    refuses("is not JSON", convert_from, "llama", source)
    (source / "config.json").unlink()
    refuses("holds no config.json", convert_from, "llama", source)


def test_damaged_files(theirs: Folder, refuses: Refuses) -> None:
    source = theirs(LlamaForCausalLM, "5KB")
    index = json.loads((source / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shard = source / index["weight_map"]["model.norm.weight"]
    undamaged = shard.read_bytes()
    for damaged in (undamaged[:-4], undamaged[:5], b""):
        shard.write_bytes(damaged)
        refuses(rf"{shard.name}' is no complete safetensors file", convert_from, "llama", source)
    shard.unlink()
    refuses(rf"lacks {shard.name}, which model\.safetensors\.index\.json names", convert_from, "llama", source)
    shard.write_bytes(undamaged)
    file_of_key = index["weight_map"]
    for changed, pattern in (
        ({**file_of_key, "more": shard.name}, "disagree on more"),
        ({**file_of_key, "more": 3}, "must say under weight_map which file holds each tensor"),
        ([], "must say under weight_map"),
        ({**file_of_key, "more": "../other.safetensors"}, r"must name files of its own folder, got \.\./other\."),
    ):
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": changed}), encoding="utf-8")
        refuses(pattern, convert_from, "llama", source)


def test_options(theirs: Folder, tmp_path: Path, refuses: Refuses) -> None:
    source = theirs(LlamaForCausalLM)
    for convert in (convert_from, convert_to):
        refuses("must be one of 'microsoft', .*'llama', .*, got 'gpt2'", convert, "gpt2", source)
    refuses("can become 'softmax' or 'diff_v2'.*, not 'diff'", convert_from, "llama", source, attention_type="diff")
    message = "must be a number of bytes, 1 or more, or like '5GB', got 'big'"
    for convert in (convert_from, convert_to):
        refuses(message, convert, "llama", source, max_shard_size="big")
    with pytest.raises(FileExistsError, match="theirs' exists already; name a folder that does not"):
        convert_from("llama", source, source)


def test_a_disk_without_room(theirs: Folder, monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    refuses(
        r"has 1,000 bytes free, and the converted weights need \d\d,\d+",
        convert_from,
        "llama",
        theirs(LlamaForCausalLM),
    )
