"""Figures as SVG files of their own, for Markdown: on white, as they are printed."""

import re
from html import escape

from matplotlib.figure import Figure

from diff_transformer.report.figures import PAGE, THEME, svg

# Tells a figure of ours from somebody's file.
GENERATOR = "<!-- diff-transformer report -->"
# A browser that lacks the font which the layout was made for takes one that is no wider.
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
_PIXELS_PER_POINT = 96 / 72


def svg_file(figure: Figure, description: str) -> str:
    """The figure as the text of an SVG file: the colours of the light page, and what it shows in words."""
    text = svg(figure)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert box is not None  # matplotlib's own
    width, height = (round(float(side) * _PIXELS_PER_POINT) for side in box.groups())
    for name, (light, _) in THEME.items():
        text = text.replace(f"var(--{name})", light)
    text = text.replace("'DejaVu Sans'", _FONTS)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box[0][9:-1]}" width="{width}" height="{height}">'
    inside = text[text.index(">") + 1 :]
    described = f"<desc>{escape(description)}</desc>"
    return f'{opening}\n{GENERATOR}\n{described}\n<rect width="100%" height="100%" fill="{PAGE}"/>{inside}'
