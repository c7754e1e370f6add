"""Tasks for lm-evaluation-harness whose data lies on this disk."""

import json
from pathlib import Path
from typing import Any

import yaml


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def write_task(folder: Path, name: str, choices: list[str], **definition: Any) -> None:
    """A YAML task of lm_eval's own kind: four times the same question, which `datasets` reads; the first is right."""
    folder.mkdir(exist_ok=True)
    data = write_lines(folder / f"{name}.jsonl", [{"text": "to be or", "options": choices}] * 4)
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "options",
        "doc_to_target": 0,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
        **definition,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
