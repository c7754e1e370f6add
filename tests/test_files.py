"""JSON that somebody hands us, and the permissions of files that libraries make."""

from pathlib import Path

import pytest

from diff_transformer.utils.files import parse_json, read_json

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DEEP, "lists in lists too deep"),
        (DEEP.encode(), "lists in lists too deep"),
        ('{"a": ' * 200_000, "lists in lists too deep"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ("9" * 5000, "not JSON: .*Exceeds the limit"),
        (b"\xff{}", "UTF-8 text: .* at byte 0"),
    ],
    ids=["deep", "deep bytes", "deep objects", "half", "nothing", "digits", "bytes"],
)
def test_what_cannot_be_read_is_one_sentence_with_its_place(data: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"line 3 .*{message}") as caught:
        parse_json(data, "line 3")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    file = tmp_path / "config.json"
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(ValueError, match=f"config.json .*{message}"):
        read_json(file)


def test_what_can_be_read_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"λ": [1, null]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"λ": [1, None]}
    (tmp_path / "a.json").write_text('{"λ": [1, null]}', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == parse_json('\ufeff{"λ": [1, null]}', "") == {"λ": [1, None]}
    with pytest.raises(FileNotFoundError, match=r"b\.json does not exist"):
        read_json(tmp_path / "b.json")
