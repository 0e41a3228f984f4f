"""The picture of the tile in the README, as SVG text: ``tile_svg()``; ``python -m tools.docs`` writes it."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 1040, 500
INK, QUIET, PAPER = "#1f2933", "#52606d", "#ffffff"
FILLS = {
    "stream": "#eef2f6",
    "load": "#dbeafe",
    "memory": "#e6f4ea",
    "array": "#fde8d0",
    "softmax": "#f3e0f7",
    "out": "#dbeafe",
    "walk": "#fff6cc",
}
FONT = "font-family='Helvetica, Arial, sans-serif'"


def _box(x: int, y: int, width: int, height: int, kind: str, title: str, *lines: str) -> str:
    parts = [
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='{FILLS[kind]}' stroke='{INK}' "
        "stroke-width='1.5'/>"
    ]
    total = 20 + 16 * len(lines)
    top = y + (height - total) / 2 + 15
    middle = x + width / 2
    parts.append(
        f"<text x='{middle:g}' y='{top:g}' {FONT} font-size='15' font-weight='bold' fill='{INK}' "
        f"text-anchor='middle'>{escape(title)}</text>"
    )
    for number, line in enumerate(lines):
        parts.append(
            f"<text x='{middle:g}' y='{top + 18 + 16 * number:g}' {FONT} font-size='12' fill='{QUIET}' "
            f"text-anchor='middle'>{escape(line)}</text>"
        )
    return "\n".join(parts)


def _arrow(*points: tuple[int, int], control: bool = False) -> str:
    """A line through the points, all of whose pieces are level or upright, with a head at its end."""
    (last_x, last_y), (x, y) = points[-2:]
    step_x, step_y = (x > last_x) - (x < last_x), (y > last_y) - (y < last_y)
    neck_x, neck_y = x - 9 * step_x, y - 9 * step_y
    path = " ".join(
        f"{'M' if number == 0 else 'L'}{px} {py}" for number, (px, py) in enumerate([*points[:-1], (neck_x, neck_y)])
    )
    dashes = " stroke-dasharray='5 4'" if control else ""
    colour = QUIET if control else INK
    wings = f"{neck_x + 4 * step_y},{neck_y + 4 * step_x} {neck_x - 4 * step_y},{neck_y - 4 * step_x}"
    return (
        f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.6'{dashes}/>"
        f"<polygon points='{x},{y} {wings}' fill='{colour}'/>"
    )


def _label(x: int, y: int, text: str, anchor: str = "middle") -> str:
    return (
        f"<text x='{x}' y='{y}' {FONT} font-size='12' font-style='italic' fill='{QUIET}' "
        f"text-anchor='{anchor}'>{escape(text)}</text>"
    )


def tile_svg() -> str:
    """Stream in, loader and lift, memories, array, softmax, normaliser, stream out; the walker's control dashed."""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        "role='img' aria-label='Block diagram of the attention tile'>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='{PAPER}'/>",
        # Units.
        _box(340, 30, 370, 60, "walk", "walker", "kept blocks only; scores run ahead of P·V"),
        _box(120, 140, 150, 120, "load", "loader", "descriptor, block mask,", "q, k, v to memories"),
        _box(120, 330, 150, 100, "load", "lift", "C, first R lanes of q, k", "→ lifted lanes, bias β"),
        _box(340, 140, 150, 54, "memory", "queries", "scaled, a ring of groups"),
        _box(340, 206, 150, 54, "memory", "keys, values", "two slots of a head"),
        _box(340, 330, 150, 46, "memory", "lifted keys"),
        _box(340, 388, 150, 46, "memory", "bias β"),
        _box(560, 140, 150, 180, "array", "array", "rows × lanes MACs,", "split into segments", "", "scores, P·V"),
        _box(560, 388, 150, 76, "softmax", "softmax", "base 2, online,", "integer maximum"),
        _box(780, 190, 130, 80, "out", "normaliser", "÷ Σp, round,", "status record"),
        # Data.
        _arrow((20, 200), (120, 200)),
        _arrow((195, 260), (195, 330)),
        _arrow((270, 167), (340, 167)),
        _arrow((270, 233), (340, 233)),
        _arrow((270, 353), (340, 353)),
        _arrow((270, 411), (340, 411)),
        _arrow((270, 340), (305, 340), (305, 185), (340, 185)),
        _arrow((490, 167), (560, 167)),
        _arrow((490, 233), (560, 233)),
        _arrow((490, 353), (525, 353), (525, 280), (560, 280)),
        _arrow((490, 411), (540, 411), (540, 306), (560, 306)),
        _arrow((600, 320), (600, 388)),
        _arrow((670, 388), (670, 320)),
        _arrow((710, 230), (780, 230)),
        _arrow((710, 426), (845, 426), (845, 270)),
        _arrow((910, 230), (1020, 230)),
        # Control.
        _arrow((195, 140), (195, 60), (340, 60), control=True),
        _arrow((415, 90), (415, 140), control=True),
        _arrow((635, 90), (635, 140), control=True),
        _arrow((710, 60), (745, 60), (745, 408), (710, 408), control=True),
        # Words.
        _label(20, 190, "stream in", "start"),
        _label(1020, 215, "stream out", "end"),
        _label(592, 358, "s", "end"),
        _label(678, 358, "p, rescale", "start"),
        _label(752, 222, "Σpv", "start"),
        _label(780, 444, "Σp", "start"),
        _label(268, 52, "mask, what is loaded"),
        _label(430, 120, "addresses", "start"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
