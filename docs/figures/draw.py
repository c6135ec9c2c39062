"""Draw the figures of the README and the site, each for a light and for a dark page: `python docs/figures/draw.py`."""

from pathlib import Path


LIGHT = {
    "ink": "#1f2933", "dim": "#5a6672", "line": "#9aa5b1", "box": "#eef1f5",
    "draft": "#cfe3ff", "good": "#bfe6c8", "bad": "#ffc9c2", "own": "#ffe3a3", "bar": "#5b8def",
}  # fmt: skip
DARK = {
    "ink": "#e8ecf1", "dim": "#a9b4c0", "line": "#66717d", "box": "#2a323c",
    "draft": "#2b4a7d", "good": "#245c38", "bad": "#7d2f2a", "own": "#6b541b", "bar": "#7fa8f8",
}  # fmt: skip
FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif'"


def text(x, y, words, colour, size=14, anchor="start", weight="normal"):
    return (
        f"<text x='{x}' y='{y}' fill='{colour}' font-size='{size}' text-anchor='{anchor}' font-weight='{weight}'>"
        f"{words}</text>"
    )


def box(x, y, words, fill, ink, line, wide=64, dashed=False):
    dash = " stroke-dasharray='4 3'" if dashed else ""
    return f"<rect x='{x}' y='{y}' width='{wide}' height='28' rx='6' fill='{fill}' stroke='{line}'{dash}/>" + text(
        x + wide / 2, y + 19, words, ink, 14, "middle"
    )


def document(wide, high, title, parts):
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}' width='{wide}' height='{high}' role='img' {FONT}>"
        f"<title>{title}</title>{''.join(parts)}</svg>\n"
    )


def one_round(c):
    """Draw five stages that the same five tokens pass."""
    left, step, first = 104, 74, 8
    drafted = ["buys", "4", "more", ".", "Now"]
    stages = [
        ("1 draft", "the small model proposes; a stop says when to end"),
        ("2 select", "a filter says how many go to the target"),
        ("3 verify", "one target forward: a distribution for each position"),
        ("4 accept", "a rule accepts a prefix; what follows is dropped"),
        ("5 commit", "they join the text, and one token of the target"),
    ]
    parts = []
    for i, (name, note) in enumerate(stages):
        y = first + i * step
        parts += [text(0, y + 19, name, c["ink"], 16, weight="600"), text(left, y + 47, note, c["dim"], 13)]
    for j, word in enumerate(drafted):
        x = left + j * 72
        sent = j < 4
        parts.append(box(x, first, word, c["draft"], c["ink"], c["line"]))
        parts.append(
            box(
                x,
                first + step,
                word,
                c["draft"] if sent else "none",
                c["ink"] if sent else c["dim"],
                c["line"],
                dashed=not sent,
            )
        )
        y = first + 2 * step
        parts.append(box(x, y, "", c["box"], c["ink"], c["line"]))
        heights = [(5, 20, 8, 4), (6, 4, 18, 9), (20, 5, 4, 7), (14, 4, 20, 5), (7, 16, 9, 6)][j]
        parts += [
            f"<rect x='{x + 10 + 12 * k}' y='{y + 25 - h}' width='8' height='{h}' fill='{c['bar']}'/>"
            for k, h in enumerate(heights)
        ]
        if sent:
            fill, mark = (c["good"], "✓") if j < 3 else (c["bad"], "✗")
            parts.append(box(x, first + 3 * step, f"{word} {mark}", fill, c["ink"], c["line"]))
    y = first + 4 * step
    parts += [box(left + j * 72, y, word, c["good"], c["ink"], c["line"]) for j, word in enumerate(drafted[:3])]
    parts.append(box(left + 3 * 72, y, ",", c["own"], c["ink"], c["line"]))
    return document(470, first + 5 * step - 18, "One round: draft, select, verify, accept, commit", parts)


def row_cache(c):
    """Draw three rows of different length in one cache, before and after a round."""
    parts, cell = [], 22
    rows = [("row 0", 9, 3, 2), ("row 1", 5, 3, 0), ("row 2", 7, 3, 3)]
    for k, title in enumerate(
        ("written in a round: the text and 3 drafted tokens", "after the round: a length is all that changes")
    ):
        top = 10 + k * 150
        parts.append(text(0, top + 8, title, c["ink"], 15, weight="600"))
        for r, (name, known, drafted, accepted) in enumerate(rows):
            y = top + 22 + r * 36
            parts.append(text(0, y + 18, name, c["dim"], 13))
            for s in range(16):
                x = 56 + s * (cell + 3)
                if s < known:
                    fill = c["good"]
                elif s < known + drafted:
                    fill = c["draft"] if k == 0 else c["good"] if s < known + accepted else c["box"]
                else:
                    fill = "none"
                parts.append(
                    f"<rect x='{x}' y='{y}' width='{cell}' height='26' rx='4' fill='{fill}' stroke='{c['line']}'/>"
                )
            end = known + (drafted if k == 0 else accepted)
            x = 56 + end * (cell + 3) - 2
            parts.append(f"<line x1='{x}' y1='{y - 3}' x2='{x}' y2='{y + 29}' stroke='{c['ink']}' stroke-width='3'/>")
    return document(470, 300, "Rows of different length in one cache; the thick bar is a row's length", parts)


if __name__ == "__main__":
    for name, draw in (("round", one_round), ("row-cache", row_cache)):
        for shade, colours in (("light", LIGHT), ("dark", DARK)):
            Path(__file__).with_name(f"{name}-{shade}.svg").write_text(draw(colours), encoding="utf-8")
