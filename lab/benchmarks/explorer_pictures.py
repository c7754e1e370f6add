"""Takes the pictures of the explorer in docs, in chromium where playwright and chromium are installed.

python lab/benchmarks/explorer_pictures.py         # writes docs/explorer.png and docs/explorer-phone.png
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from diff_transformer.cli.explored_checkpoints import shipped_pairs, write_recorded_page

READY = ".explorer[data-ready=true]"


def main() -> None:
    """Write the page of the package's first pair of models, and take both pictures of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs"), help="the folder")
    folder = parser.parse_args().output
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as started:
        file = Path(temporary) / "page.html"
        write_recorded_page(*next(iter(shipped_pairs().values())), file, device="cpu", text=None)
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 1060})
        page.goto(file.as_uri())
        page.wait_for_selector(READY)
        page.screenshot(path=folder / "explorer.png")
        page = browser.new_page(
            viewport={"width": 390, "height": 844}, device_scale_factor=2, is_mobile=True, color_scheme="dark"
        )
        page.goto(file.as_uri())
        page.wait_for_selector(READY)
        page.fill("#lambda-factor", "0.3")
        page.wait_for_timeout(500)
        page.evaluate("scrollTo(0, document.querySelector('.lambda').getBoundingClientRect().top)")
        page.wait_for_timeout(500)
        page.screenshot(path=folder / "explorer-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
