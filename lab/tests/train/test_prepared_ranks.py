"""Two ranks and one text: the first looks at it and tells the other, which maps what is there."""

import json
import sys
from pathlib import Path

import pytest

import ranks
from diff_lab.train import build_data, load_recipe
from diff_lab.train.distributed import broadcast_from_rank0
from diff_transformer.utils import manifest


def script() -> None:
    rank, folder = ranks.join()
    read: list[str] = []
    digest = manifest.sha256_of

    def spy(file: str, *prefix: bytes) -> str:
        read.extend([file] * str(file).endswith(".txt"))
        return digest(file, *prefix)

    manifest.sha256_of = spy
    recipe = load_recipe("tiny", [f"data.paths={folder / 'text'}", f"data.cache={folder / 'cache'}"])
    data = build_data(recipe)
    report = {
        "read": len(read),
        "sum": int(data.batches.train_batch(3)["input_ids"].sum()),
        "source": data.batches.source,
    }

    def fail() -> None:
        raise ValueError("there is no text")

    try:
        broadcast_from_rank0(fail)
    except ValueError as error:
        report["error"] = str(error)
    report["told"] = broadcast_from_rank0(lambda: f"rank {rank}")
    (folder / f"{rank}.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    (folder / "text").mkdir()
    for number in range(5):
        (folder / "text" / f"{number}.txt").write_text(f"{number} to be, or not to be\n" * 200)
    ranks.run(__file__, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks.RANKS)]


def test_the_first_reads_and_the_others_are_told(answers: list[dict[str, object]]) -> None:
    first, second = answers
    assert (first["read"], second["read"]) == (5, 0)
    assert (first["sum"], first["source"]) == (second["sum"], second["source"])
    assert first["told"] == second["told"] == "rank 0"


def test_an_error_of_the_first_is_everybodys(answers: list[dict[str, object]]) -> None:
    first, second = answers
    assert first["error"] == "there is no text"
    assert second["error"] == "Process 0: there is no text"


if __name__ == "__main__":
    assert sys.argv[1:]
    script()
