"""Figures as SVG files of their own, for Markdown: on white, as they are printed."""

import re
from html import escape

from diff_transformer.report.figures import PAGE, THEME

# Tells a figure of ours from somebody's file.
GENERATOR = "<!-- diff-transformer report -->"
# A browser that lacks the font which the layout was made for takes one that is no wider.
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
_PIXELS_PER_POINT = 96 / 72


def svg_file(element: str, description: str, *, width: int | None = None) -> str:
    """An element that `figures.svg` made as the text of a file: the light page's colours, what it shows in words.

    It is `width` pixels wide where it is shown as it is, by default as wide as it was drawn.
    """
    text = element
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert box is not None  # matplotlib's own
    drawn_width, drawn_height = (float(side) * _PIXELS_PER_POINT for side in box.groups())
    height = round(drawn_height * (width or drawn_width) / drawn_width)
    for name, (light, _) in THEME.items():
        text = text.replace(f"var(--{name})", light)
    text = text.replace("'DejaVu Sans'", _FONTS)
    size = f'width="{width or round(drawn_width)}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} {size}>'
    inside = text[text.index(">") + 1 :]
    described = f"<desc>{escape(description)}</desc>"
    return f'{opening}\n{GENERATOR}\n{described}\n<rect width="100%" height="100%" fill="{PAGE}"/>{inside}'
