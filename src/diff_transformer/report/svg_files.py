"""Figures as SVG files of their own, for Markdown: in the colours of the page that shows them, light or dark."""

import re
from html import escape

from diff_transformer.report.figures import DARK, LIGHT

# Tells a figure of ours from somebody's file.
GENERATOR = "<!-- diff-transformer report -->"
# A browser that lacks the font which the layout was made for takes one that is no wider.
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
_PIXELS_PER_POINT = 96 / 72
_STYLE = f"<style>svg {{ {LIGHT}}} @media (prefers-color-scheme: dark) {{ svg {{ {DARK}}} }}</style>"


def svg_file(element: str, description: str, *, width: int | None = None) -> str:
    """An element that `figures.svg` made as the text of a file: its colours, what it shows in words.

    The page's own colour lies behind it: a host may be dark where the browser is told to be light.
    It is `width` pixels wide where it is shown as it is, by default as wide as it was drawn.
    """
    text = element
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert box is not None  # matplotlib's own
    drawn_width, drawn_height = (float(side) * _PIXELS_PER_POINT for side in box.groups())
    height = round(drawn_height * (width or drawn_width) / drawn_width)
    text = text.replace("'DejaVu Sans'", _FONTS)
    size = f'width="{width or round(drawn_width)}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} {size}>'
    inside = text[text.index(">") + 1 :]
    described = f"<desc>{escape(description)}</desc>"
    behind = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    return f"{opening}\n{GENERATOR}\n{described}\n{_STYLE}\n{behind}{inside}"
