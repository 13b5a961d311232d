"""Draw the figures of README.md and docs/, light and dark: `python docs/figures/make.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#59636e", "line": "#8c959f", "box": "#f6f8fa", "edge": "#d1d9e0",
              "ranks": ("#0969da", "#1a7f37", "#bc4c00", "#8250df"), "mean": "#1f2328"},
    "dark": {"ink": "#f0f6fc", "faint": "#9198a1", "line": "#656c76", "box": "#151b23", "edge": "#3d444d",
             "ranks": ("#58a6ff", "#3fb950", "#f0883e", "#bc8cff"), "mean": "#f0f6fc"},
}  # fmt: skip
Theme = dict[str, object]


def text(x: float, y: float, words: str, fill: object, size: int = 15, more: str = "") -> str:
    """Write text that starts at x, or as `more` says."""
    return f"<text x='{x:g}' y='{y:g}' fill='{fill}' font-size='{size}' {more}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, theme: Theme, more: str = "") -> str:
    """Draw a rectangle with round corners."""
    style = more or f"fill='{theme['box']}' stroke='{theme['edge']}'"
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='8' {style}/>"


def arrow(path: str, theme: Theme) -> str:
    """Draw a line with a head."""
    style = f"fill='none' stroke='{theme['line']}' stroke-width='1.6' marker-end='url(#head)'"
    return f"<path d='{path}' {style}/>"


def picture(width: int, height: int, label: str, theme: Theme, parts: Iterator[str]) -> str:
    """Put the parts into a file's frame."""
    head = "<marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
    head += "orient='auto'>"
    head += f"<path d='M0 0 8 4 0 8z' fill='{theme['line']}'/></marker>"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' {FONT} "
        f"role='img' aria-label='{escape(label)}'>",
        f"<defs>{head}</defs>", *parts, "</svg>",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def ranks(theme: Theme) -> Iterator[str]:
    """Four ranks on two hosts: each computes gradients of its own data, all get the average."""
    colors = theme["ranks"]
    assert isinstance(colors, tuple)
    ink, faint, middle = theme["ink"], theme["faint"], "text-anchor='middle'"
    for host in (0, 1):
        left = 30 + host * 400
        yield box(left, 14, 340, 232, theme)
        yield text(left + 14, 37, f"host node{host + 1}", faint, 14)
        for local in (0, 1):
            rank = 2 * host + local
            x = left + 22 + local * 156
            yield box(x, 50, 140, 182, theme, f"fill='none' stroke='{colors[rank]}' stroke-width='1.6'")
            yield text(x + 70, 73, f"rank {rank}", colors[rank], 15, f"{middle} font-weight='600'")
            yield text(x + 70, 95, "its part of the data", faint, 13, middle)
            yield arrow(f"M{x + 70} 102V116", theme)
            yield text(x + 70, 132, "same model", ink, 14, middle)
            yield arrow(f"M{x + 70} 139V153", theme)
            yield text(x + 70, 168, "gradients", ink, 14, middle)
            for number, height in enumerate(HEIGHTS[rank]):
                place = f"x='{x + 31 + 20 * number}' y='{218 - height}' width='14' height='{height}'"
                yield f"<rect {place} fill='{colors[rank]}'/>"
            yield arrow(f"M{x + 70} 232V275", theme)
    yield box(30, 278, 740, 58, theme, f"fill='none' stroke='{theme['mean']}' stroke-width='1.6'")
    bold = f"{middle} font-weight='600'"
    yield text(400, 302, "Ringdance averages gradients while they are computed", ink, 16, bold)
    yield text(400, 324, "shared memory within a host, MPI between hosts", faint, 14, middle)
    for rank in range(4):
        x = 122 + (rank % 2) * 156 + (rank // 2) * 400
        yield arrow(f"M{x} 336V358", theme)
        for number, column in enumerate(zip(*HEIGHTS, strict=True)):
            height = sum(column) / len(column)
            place = f"x='{x - 39 + 20 * number}' y='{404 - height:g}' width='14' height='{height:g}'"
            yield f"<rect {place} fill='{theme['mean']}'/>"
    yield text(400, 430, "the same average on all ranks, so all models stay equal", ink, 15, middle)


HEIGHTS = ((38, 12, 20, 6), (26, 22, 30, 10), (36, 8, 12, 20), (28, 18, 26, 4))


def architecture(theme: Theme) -> Iterator[str]:
    """The layers that a script and the command line go through."""
    ink, faint = theme["ink"], theme["faint"]
    colors = theme["ranks"]
    assert isinstance(colors, tuple)
    for x, title, rows in (
        (20, "in each rank: what your script imports", LIBRARY),
        (510, "in your shell: the command ringdance", LAUNCHER),
    ):
        yield text(x, 26, title, faint, 14)
        for number, (name, what) in enumerate(rows):
            y = 40 + number * 74
            color = colors[0] if x == 20 else colors[2]
            yield box(x, y, 470, 54, theme, f"fill='{theme['box']}' stroke='{color}' stroke-width='1.4'")
            yield text(x + 14, y + 23, name, ink, 14, "font-weight='600'")
            yield text(x + 14, y + 43, what, faint, 13)
            if number + 1 < len(rows):
                yield arrow(f"M{x + 235} {y + 54}V{y + 72}", theme)
    rule = "Each layer imports only the layers below it. All may import settings, errors and host."
    yield text(20, 354, rule, faint, 13)
    yield text(20, 374, "The engine and the launcher do not import each other.", faint, 13)


LIBRARY = (
    ("torch · tensorflow · keras · jax · mxnet · numpy", "bindings: tensors as views of memory"),
    ("training", "what the bindings share: init(), gradients, sharding, checkpoints"),
    ("core", "the engine: submit → agree → batch → exchange → complete"),
    ("core.transport", "MPI, and the memory that the ranks of a host share"),
)
LAUNCHER = (
    ("tools", "a package or module for each subcommand: doctor, report, plan, ..."),
    ("submit", "jobs for Kubernetes, SageMaker and Ray"),
    ("launch", "job → plan (pure data) → one agent per host → mpiexec → ranks"),
    ("host", "what runs on every host: agents, schedulers, cleanup"),
)
README = ("ranks-light.svg", "ranks-dark.svg")  # shown by README.md, so tracked; Sphinx draws the others


def figures() -> Iterator[tuple[str, str]]:
    """Yield each file's name and content."""
    for name, theme in THEMES.items():
        label = "Four ranks on two hosts average their gradients"
        yield f"ranks-{name}.svg", picture(800, 444, label, theme, ranks(theme))
        label = "Layers: bindings, training, core, transport; tools, submit, launch, host"
        yield f"architecture-{name}.svg", picture(1000, 386, label, theme, architecture(theme))


if __name__ == "__main__":
    for file, content in figures():
        (HERE / file).write_text(content)
