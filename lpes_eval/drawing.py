"""How figures are drawn and written, for the page, for papers, and for a notebook; and the figure of layer factors.

Colours are those of Okabe & Ito, which people tell apart whatever their colour vision; markers differ as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lpes_eval.files import write_atomically

COLORS = ("#595959", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
MARKERS = ("s", "o", "^", "D", "v", "P")
INK = "#1a1a1b"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "text.parse_math": False,
    "savefig.transparent": True,
}
SVG = "{http://www.w3.org/2000/svg}"
Line = tuple[str, Sequence[float], int, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Picture:
    """A figure, the name of its files, its caption, and what each marker says when it is pointed at."""

    name: str
    caption: str
    figure: Any
    tips: Mapping[str, Sequence[str]]

    def save(self, folder: Path, kinds: Sequence[str] = ("png", "svg")) -> None:
        """Write it in these formats."""
        for kind in kinds:
            write_atomically(folder / f"{self.name}.{kind}", self._file(kind, dpi=300, transparent=kind != "png"))

    def in_notebook(self) -> Any:
        """The matplotlib figure, which a notebook shows as it stands in the page."""
        self.figure._repr_png_ = lambda: self._file("png", dpi=100, transparent=False)
        return self.figure

    def _file(self, kind: str, style: Mapping[Any, Any] = {}, **how: Any) -> bytes:
        file = BytesIO()
        with _style(style):
            self.figure.savefig(file, format=kind, **how)
        return file.getvalue()

    def inline(self) -> str:
        """The figure as an SVG element of a page: its colours follow the page, and markers carry their titles."""
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        ElementTree.register_namespace("", SVG[1:-1])
        ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        root = ElementTree.fromstring(self._file("svg", {"svg.fonttype": "none"}, metadata=no_metadata))
        for group in root.iter(f"{SVG}g"):
            name = group.get("id", "")
            for marker, tip in zip(group.iter(f"{SVG}use"), self.tips.get(name, ()), strict=False):
                ElementTree.SubElement(marker, f"{SVG}title").text = tip
            if name in self.tips:
                del group.attrib["id"]
        for name in ("width", "height"):
            del root.attrib[name]
        root.attrib |= {"role": "img", "aria-label": self.caption}
        text = ElementTree.tostring(root, encoding="unicode")
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
        for number, color in enumerate(COLORS):
            text = text.replace(color, f"var(--run-{number})")
        return text.replace(INK, "currentColor")


class Drawing:
    """A figure while it is drawn, and what its marks say."""

    def __init__(self, x: str, *ys: str, height: float = 3.2) -> None:
        from matplotlib.figure import Figure

        with _style():
            figure = Figure(figsize=(5.2, height), layout="constrained")
            self.panels = list(figure.subplots(len(ys), sharex=True, squeeze=False)[:, 0])
            self.axes = self.panels[0]
            self.panels[-1].set_xlabel(x)
            for axes, y in zip(self.panels, ys, strict=True):
                axes.set_ylabel(y)
        self.tips: dict[str, Sequence[str]] = {}

    def marks(self, name: str, xs: Any, ys: Any, tips: Sequence[str], place: int, **how: Any) -> None:
        """Draw marks of one kind, if there are any, in the colour and shape of its place; ``panel`` says where."""
        axes = self.panels[how.pop("panel", 0)]
        if xs:
            gid, color = f"marks{len(self.tips)}", COLORS[place % 6]
            face = "none" if how.pop("hollow", False) else color
            with _style():
                axes.plot(xs, ys, color=color, marker=MARKERS[place % 6], mfc=face, label=name, gid=gid, **how)
            self.tips[gid] = tips

    def picture(self, name: str, caption: str, title: str = "") -> Picture:
        """The figure with its title, and a legend of what has a name."""
        with _style():
            self.axes.set_title(title, loc="left", x=0)
            lines, names = self.axes.get_legend_handles_labels()
            columns = 2 if max(map(len, names), default=0) <= 28 else 1
            if names:
                self.axes.figure.legend(lines, names, loc="outside lower left", ncols=columns, fontsize=8)
        return Picture(re.sub(r"[^\w.-]+", "-", name).strip("-"), caption, self.axes.figure, self.tips)


def factors(lines: Sequence[Line]) -> Picture:
    """One factor a layer, of each line's name, values, place among the colours, and control points."""
    from matplotlib.ticker import MaxNLocator

    drawing = Drawing("layer", "factor")
    for name, values, place, points in lines:
        if points:
            label = f"{short(name)}: control points"
            drawing.axes.plot(*zip(*points, strict=True), ":x", color=COLORS[place % 6], label=label)
        tips = [f"{name}, layer {h}: {value:.3f}" for h, value in enumerate(values)]
        drawing.marks(short(name), range(len(values)), values, tips, place)
    drawing.axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    drawing.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawing.picture("factors", "Position scaling factor of each layer; 1 is the plain model")


def short(name: str, most: int = 60) -> str:
    """A name that has room in a picture."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 :]}"


def _style(more: Mapping[Any, Any] = {}) -> Any:
    from matplotlib import rc_context

    return rc_context({**STYLE, **more})
