"""The page's committed bundle: made from the sources in `web`, small, and asking nobody for anything."""

import hashlib
import re
from pathlib import Path

import pytest

from diff_transformer.explorer.page import BUNDLE, page_html

WEB = Path(__file__).resolve().parents[2] / "web"


def sources_hash() -> str:
    """As web/build.mjs computes it."""
    names = [
        "build.mjs",
        "package-lock.json",
        "package.json",
        *(f"src/{file.name}" for file in (WEB / "src").iterdir()),
    ]
    digest = hashlib.sha256()
    for name in sorted(names):
        content = (WEB / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@pytest.mark.skipif(not WEB.is_dir(), reason="the sources of the page are in a checkout alone")
@pytest.mark.parametrize("name", ["explorer.js", "explorer.css"])
def test_the_bundle_is_made_from_the_sources(name: str) -> None:
    first_line = (BUNDLE / name).read_text(encoding="utf-8").splitlines()[0]
    assert first_line == f"/* sources {sources_hash()} */", "run `npm ci && npm run build` in the folder web"


def test_the_bundle_is_small_and_reaches_for_nothing() -> None:
    files = list(BUNDLE.iterdir())
    assert {file.name for file in files} == {"explorer.js", "explorer.css", "LICENSES.txt"}
    assert sum(file.stat().st_size for file in files) < 150_000
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.suffix != ".txt")
    addresses = {address.rstrip("/") for address in re.findall(r"https?://[\w./-]+", text)}
    # Names of XML's kinds of elements, which nobody loads, and the paper.
    assert addresses == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",
        "http://www.w3.org/1998/Math/MathML",
        "https://arxiv.org/abs/2410.05258",
    }
    assert "</script" not in text
    assert "</style" not in text
    assert "@import" not in text


def test_data_cannot_leave_their_place_in_the_page() -> None:
    page = page_html({"text": "</script><script>alert(1)</script>"}, title="<b>&", may_ask=False)
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<title>&lt;b&gt;&amp;</title>" in page
    assert "connect-src 'none'" in page
    assert "default-src 'none'" in page
    assert "connect-src 'self'" in page_html({}, title="", may_ask=True)
    with pytest.raises(ValueError, match="Out of range float"):
        page_html({"loss": float("nan")}, title="", may_ask=False)
