"""Two ranks and one text: rank 0 looks at it and tells the other, which maps what is there."""

import json
from pathlib import Path
from typing import Any

import ranks
from diff_lab.data import corpus
from diff_lab.data.batches import ALL_ROWS
from diff_lab.train import Data, build_data, load_recipe, train
from diff_lab.train.distributed import on_rank0


def script() -> None:
    rank, folder = ranks.join()
    read: list[str] = []
    digest = corpus.sha256_of

    def spy(file: str, *prefix: bytes) -> str:
        read.extend([file] * str(file).endswith(".txt"))
        return digest(file, *prefix)

    corpus.sha256_of = spy
    recipe = load_recipe("tiny", [f"data.paths={folder / 'text'}", f"data.cache={folder / 'cache'}", "train.steps=2"])
    batches = build_data(recipe).batches
    report = {"read": len(read), "data": [int(batches.train_batch(3)["input_ids"].sum()), batches.source]}
    built: list[tuple[int, int, int]] = []
    make = batches.train_batch

    def seen(step: int, rows: slice = ALL_ROWS) -> Any:
        built.append((step, *rows.indices(recipe.data.batch_size)[:2]))
        return make(step, rows)

    batches.train_batch = seen  # type: ignore[method-assign]
    train(recipe, folder / "run", data=Data(batches))
    report["built"] = built

    def fail() -> None:
        raise ValueError("there is no text")

    try:
        on_rank0(fail)
    except ValueError as error:
        report["error"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(report))


def test_the_first_reads_and_the_others_are_told(tmp_path: Path) -> None:
    """And an error of the first is everybody's."""
    (tmp_path / "text").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} to be, or not to be\n" * 200)
    ranks.run(__file__, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks.RANKS))
    # The first before they are tokenised, and whichever does that after it.
    assert (first["read"], second["read"]) in ((10, 0), (5, 5))
    assert first["data"] == second["data"]
    half = load_recipe("tiny").data.batch_size // 2
    assert first["built"] == [[1, 0, 2 * half], [1, 0, half], [2, 0, half]]  # the first to know the data again
    assert second["built"] == [[1, half, 2 * half], [2, half, 2 * half]]
    assert (first["error"], second["error"]) == ("there is no text", "Process 0: there is no text")


if __name__ == "__main__":
    script()
