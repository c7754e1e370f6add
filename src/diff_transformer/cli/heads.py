"""What `--dex-heads` names: the heads of a source model that DEX is to correct."""

from pathlib import Path

from diff_transformer.files import parse_json

# How much text ranks the heads: so many sequences of so many tokens, from its beginning.
SEQUENCES, LENGTH = 16, 512


def chosen_heads(choice: str, source: Path, text: list[Path] | None) -> list[list[int]] | None:
    """The heads of each layer; None for all.

    Args:
        choice: "all"; "25%", the quarter of each layer's heads that looks most widely on ``text``; or a JSON list with
            a list of heads for each layer.
        source: the folder of the model, with its tokenizer where ``text`` is given.
        text: files or folders of text, for a share of the heads.

    Raises:
        ValueError: neither of these, text without a share or a share without text.
        FileNotFoundError: there is no such text, model or tokenizer.
    """
    if choice.endswith("%"):
        return _widest(_share(choice), source, text)
    if text:
        raise ValueError(f"--dex-text ranks heads for --dex-heads like 25%, got --dex-heads {choice}.")
    if choice == "all":
        return None
    try:
        layers = parse_json(choice, "--dex-heads")
    except ValueError:
        layers = None
    if not isinstance(layers, list) or not all(isinstance(heads, list) for heads in layers):
        raise ValueError(
            f"--dex-heads must be all, a share like 25%, or a list for each layer like [[0, 3], []], got {choice}."
        )
    return layers


def _share(choice: str) -> float:
    try:
        share = float(choice.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"--dex-heads as a share must be more than 0% and up to 100%, got {choice}.")
    return share


def _widest(share: float, source: Path, text: list[Path] | None) -> list[list[int]]:
    if not text:
        raise ValueError("--dex-heads as a share needs --dex-text, on which the heads are ranked.")
    import torch

    from diff_transformer.cli.checkpoints import find_checkpoint, load_model, load_tokenizer
    from diff_transformer.data import TextFiles
    from diff_transformer.eval import head_entropies, widest_heads

    folder = find_checkpoint(source, ours=False)
    tokenizer, corpus = load_tokenizer(folder), TextFiles(text)
    model = load_model(folder, None)
    model.set_attn_implementation("eager")
    length = min(LENGTH, getattr(model.config, "max_position_embeddings", LENGTH))
    tokens: list[int] = []
    for piece in corpus.pieces():
        tokens += tokenizer(piece.text)["input_ids"] if piece.text else []
        if len(tokens) >= SEQUENCES * length:
            break
    if not tokens:
        raise ValueError(f"--dex-text holds no text: {corpus.name}.")
    sequences = list(torch.tensor(tokens[: SEQUENCES * length]).split(length))
    return widest_heads(head_entropies(model, sequences), share)
