"""One set of drawing calls, two papers: SVG text, and pixels for PNG."""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from html import escape
from itertools import pairwise
from math import floor
from typing import NamedTuple

import numpy as np

from widgets.palette import channels
from widgets.strokes import glyph

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


class Box(NamedTuple):
    x: float
    y: float
    w: float
    h: float
    fill: str | None
    stroke: str | None
    pattern: str
    ink: str
    radius: float
    width: float
    tip: str


class Canvas(ABC):
    """Coordinates in CSS pixels, y downwards. Text stands on its base line."""

    def __init__(self, width: int, height: int, background: str) -> None:
        self.width = width
        self.height = height
        self.background = background

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str | None = None,
        stroke: str | None = None,
        *,
        pattern: str = "",
        ink: str = "#000000",
        radius: float = 0,
        width: float = 1,
        tip: str = "",
    ) -> None:
        """A box; ``pattern`` in ``ink`` over its fill; hovering tells ``tip``, where it can."""
        self._box(Box(x, y, w, h, fill, stroke, pattern, ink, radius, width, tip))

    @abstractmethod
    def _box(self, box: Box) -> None: ...

    @abstractmethod
    def grid(
        self, x: float, y: float, w: float, h: float, codes: np.ndarray, colours: list[str]
    ) -> None:
        """Fill a box with equal cells: ``codes[row, column]`` picks the colour, -1 none."""

    @abstractmethod
    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1
    ) -> None: ...

    @abstractmethod
    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str,
        size: float = 12,
        *,
        anchor: str = "start",
        bold: bool = False,
    ) -> None: ...

    @staticmethod
    @abstractmethod
    def measure(text: str, size: float, bold: bool = False) -> float:
        """How wide it will be, about."""

    def cross(self, x: float, y: float, r: float, stroke: str, width: float = 2) -> None:
        self.line(x - r, y - r, x + r, y + r, stroke, width)
        self.line(x - r, y + r, x + r, y - r, stroke, width)

    def paragraph(
        self, x: float, y: float, text: str, fill: str, size: float, room: float, most: int
    ) -> int:
        """Words in lines of at most ``room``; what does not fit ``most`` lines is cut with a dot
        or three. Returns the lines used.
        """
        lines = wrap(text, room, lambda part: self.measure(part, size))
        if len(lines) > most:
            lines = lines[:most]
            lines[-1] = lines[-1].rstrip(" ;,") + " …"
        for number, line in enumerate(lines):
            self.text(x, y + number * size * 1.35, line, fill, size)
        return len(lines)


def wrap(text: str, room: float, measure: Callable[[str], float]) -> list[str]:
    """Greedy line breaking; a word longer than a line stands alone."""
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if line and measure(longer) > room:
            lines.append(line)
            line = word
        else:
            line = longer
    return [*lines, line]


class SvgCanvas(Canvas):
    """Collects SVG elements.

    Args:
        title, description: told by screen readers.
    """

    def __init__(
        self, width: int, height: int, background: str, title: str = "", description: str = ""
    ) -> None:
        super().__init__(width, height, background)
        self.title = title
        self.description = description
        self._parts: list[str] = []
        self._patterns: dict[tuple[str, str], str] = {}

    @staticmethod
    def measure(text: str, size: float, bold: bool = False) -> float:
        narrow = sum(character in "iljtfrI.,:;'|()[] " for character in text)
        wide = sum(character in "mwMW%@" for character in text)
        far = sum(ord(character) > 0x2E7F for character in text)
        plain = len(text) - narrow - wide - far
        return size * (0.62 * plain + 0.36 * narrow + 0.95 * wide + far) * (1.05 if bold else 1)

    def _box(self, box: Box) -> None:
        x, y, w, h, fill, stroke, pattern, ink, radius, width, tip = box
        shape = f'x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"'
        if radius:
            shape += f' rx="{_n(radius)}"'
        line = f' stroke="{stroke}"' if stroke else ""
        if stroke and width != 1:
            line += f' stroke-width="{_n(width)}"'
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        end = f">{inside}</rect>" if inside else "/>"
        self._parts.append(f'<rect {shape} fill="{fill or "none"}"{line}{end}')
        if pattern:
            self._parts.append(f'<rect {shape} fill="url(#{self._pattern(pattern, ink)})"/>')

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1
    ) -> None:
        self._parts.append(
            f'<path d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}" stroke="{stroke}" '
            f'stroke-width="{_n(width)}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str,
        size: float = 12,
        *,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        more = "" if anchor == "start" else f' text-anchor="{anchor}"'
        more += ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill}"{more}>'
            f"{escape(text)}</text>"
        )

    def grid(
        self, x: float, y: float, w: float, h: float, codes: np.ndarray, colours: list[str]
    ) -> None:
        rows, columns = codes.shape
        wide, high = w / columns, h / rows
        for row in range(rows):
            edges = np.flatnonzero(np.diff(codes[row], prepend=-2, append=-2))
            for begin, end in pairwise(edges.tolist()):
                code = codes[row, begin]
                if code >= 0:
                    left, width = x + begin * wide, (end - begin) * wide
                    self.rect(left, y + row * high, width, high, colours[code])

    def _pattern(self, name: str, ink: str) -> str:
        # The colour is part of the id: pictures on one page share ids without harm.
        return self._patterns.setdefault((name, ink), f"mb-{name}-{ink[1:].lower()}")

    def to_svg(self) -> str:
        """The finished picture, with its own background."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{FONT}">'
        )
        told = f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
        defs = "".join(_PATTERN_SVG[n].format(id=i, ink=k) for (n, k), i in self._patterns.items())
        paper = f'<rect width="100%" height="100%" fill="{self.background}"/>'
        return f"{head}{told}<defs>{defs}</defs>{paper}{''.join(self._parts)}</svg>"


_PATTERN_HEAD = '<pattern id="{{id}}" width="{0}" height="{0}" patternUnits="userSpaceOnUse">'
_PATTERN_SVG = {
    "slash": _PATTERN_HEAD.format(6)
    + '<path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5" stroke="{ink}" stroke-opacity=".45"/></pattern>',
    "back": _PATTERN_HEAD.format(6)
    + '<path d="M-1 -1L7 7M-1 5L1 7M5 -1L7 1" stroke="{ink}" stroke-opacity=".5"/></pattern>',
    "cross": _PATTERN_HEAD.format(6)
    + '<path d="M-1 7L7 -1M-1 -1L7 7" stroke="{ink}" stroke-opacity=".45"/></pattern>',
    "dots": _PATTERN_HEAD.format(5)
    + '<circle cx="2.5" cy="2.5" r=".9" fill="{ink}" fill-opacity=".45"/></pattern>',
}


def _n(value: float) -> str:
    """A number, as short as one decimal allows."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


class PixelCanvas(Canvas):
    """Paints into an array and writes a PNG, with the standard library's zlib.

    Args:
        scale: pixels a CSS pixel.
    """

    def __init__(self, width: int, height: int, background: str, scale: float = 2) -> None:
        super().__init__(width, height, background)
        self.scale = scale
        shape = (round(height * scale), round(width * scale), 3)
        self.pixels = np.empty(shape, dtype=np.uint8)
        self.pixels[:] = channels(background)

    @staticmethod
    def measure(text: str, size: float, bold: bool = False) -> float:
        return sum(_advance(character) for character in text) * size * _GRID

    def _box(self, box: Box) -> None:
        x, y, w, h, fill, stroke, pattern, ink, _, width, _ = box
        s = self.scale
        left, top = round(x * s), round(y * s)
        right, bottom = max(left + 1, round((x + w) * s)), max(top + 1, round((y + h) * s))
        left, top = max(left, 0), max(top, 0)
        part = self.pixels[top:bottom, left:right]
        if part.size == 0:
            return
        if fill:
            part[:] = channels(fill)
        if pattern:
            mask = _pattern_mask(pattern, left, top, part.shape[1], part.shape[0], s)
            part[mask] = (0.55 * part[mask] + 0.45 * np.array(channels(ink))).astype(np.uint8)
        if stroke:
            edge, colour = max(1, round(width * s)), channels(stroke)
            part[:edge] = part[-edge:] = colour
            part[:, :edge] = part[:, -edge:] = colour

    def grid(
        self, x: float, y: float, w: float, h: float, codes: np.ndarray, colours: list[str]
    ) -> None:
        s = self.scale
        left, top = round(x * s), round(y * s)
        part = self.pixels[top : top + round(h * s), left : left + round(w * s)]
        rows = np.arange(part.shape[0]) * codes.shape[0] // part.shape[0]
        columns = np.arange(part.shape[1]) * codes.shape[1] // part.shape[1]
        spread = codes[rows][:, columns]
        table = np.array([channels(colour) for colour in colours], dtype=np.uint8)
        part[spread >= 0] = table[spread[spread >= 0]]

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1
    ) -> None:
        s = self.scale
        self._segments([((x1 * s, y1 * s), (x2 * s, y2 * s))], width * s, stroke)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str,
        size: float = 12,
        *,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        if anchor != "start":
            x -= self.measure(text, size) * (0.5 if anchor == "middle" else 1)
        unit = size * _GRID * self.scale
        pen, base = x * self.scale, round(y * self.scale)
        weight = max(1.2, size * self.scale * (0.115 if bold else 0.085))
        covers = []
        for character in text:
            # On whole pixels, so that a letter looks the same wherever it stands (and packs well).
            if character != " ":
                cover, left, top = _letter_cover(character, unit, weight)
                covers.append((cover, round(pen) + left, base + top))
            pen += _advance(character) * unit
        self._stain(covers, fill)

    def _segments(self, segments: list[Segment], width: float, colour: str) -> None:
        """Round-ended strokes, smoothed at their edges."""
        self._stain([_cover(segments, width)], colour)

    def _stain(self, covers: list[Cover], colour: str) -> None:
        """Mix a colour in, as far as it covers; overlaps are painted once."""
        if not covers:
            return
        left = min(left for _, left, _ in covers)
        top = min(top for _, _, top in covers)
        right = max(left + cover.shape[1] for cover, left, _ in covers)
        bottom = max(top + cover.shape[0] for cover, _, top in covers)
        whole = np.zeros((bottom - top, right - left), dtype=np.float32)
        for cover, x, y in covers:
            part = whole[y - top : y - top + cover.shape[0], x - left : x - left + cover.shape[1]]
            np.maximum(part, cover, out=part)
        height, breadth = self.pixels.shape[:2]
        x1, y1, x2, y2 = max(left, 0), max(top, 0), min(right, breadth), min(bottom, height)
        if x1 >= x2 or y1 >= y2:
            return
        seen = whole[y1 - top : y2 - top, x1 - left : x2 - left, None]
        box = self.pixels[y1:y2, x1:x2]
        box[:] = (box * (1 - seen) + np.array(channels(colour)) * seen + 0.5).astype(np.uint8)

    def to_png(self) -> bytes:
        """The finished picture: with a palette where 256 colours suffice."""
        height, width = self.pixels.shape[:2]
        packed = self.pixels.astype(np.uint32) @ np.array([65536, 256, 1], dtype=np.uint32)
        used = np.zeros(1 << 24, dtype=bool)  # faster than to sort a million pixels
        used[packed] = True
        colours = np.flatnonzero(used)
        if len(colours) <= 256:
            numbers = np.empty(1 << 24, dtype=np.uint8)
            numbers[colours] = np.arange(len(colours))
            kind, rows = 3, numbers[packed]
            table = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)
            palette = _chunk(b"PLTE", table.astype(np.uint8).tobytes())
        else:
            kind, rows, palette = 2, self.pixels.reshape(height, -1), b""
        raw = b"".join(b"\0" + row.tobytes() for row in rows)
        head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + _chunk(b"IHDR", head)
            + palette
            + _chunk(b"IDAT", zlib.compress(raw, 9))
            + _chunk(b"IEND", b"")
        )


_GRID = 0.118  # grid units to font sizes: capitals are 0.71 of the size, as in most fonts


Segment = tuple[tuple[float, float], tuple[float, float]]
Cover = tuple[np.ndarray, int, int]  # how far each pixel is covered (0 to 1); left, top


def _cover(segments: list[Segment], width: float) -> Cover:
    """What strokes of a round pen cover."""
    margin = width / 2 + 1
    xs = [x for segment in segments for x, _ in segment]
    ys = [y for segment in segments for _, y in segment]
    left, right = floor(min(xs) - margin), floor(max(xs) + margin) + 2
    top, bottom = floor(min(ys) - margin), floor(max(ys) + margin) + 2
    cover = np.zeros((bottom - top, right - left), dtype=np.float32)
    for (x1, y1), (x2, y2) in segments:
        x0, x9 = floor(min(x1, x2) - margin), floor(max(x1, x2) + margin) + 2
        y0, y9 = floor(min(y1, y2) - margin), floor(max(y1, y2) + margin) + 2
        px, py = np.arange(x0, x9) + 0.5 - x1, np.arange(y0, y9)[:, None] + 0.5 - y1
        dx, dy = x2 - x1, y2 - y1
        along = np.clip((px * dx + py * dy) / max(dx * dx + dy * dy, 1e-9), 0, 1)
        far = np.hypot(px - along * dx, py - along * dy)
        part = cover[y0 - top : y9 - top, x0 - left : x9 - left]
        np.maximum(part, np.clip(width / 2 + 0.5 - far, 0, 1), out=part)
    # In few steps, so that the picture keeps to a small palette.
    return np.round(cover * 4) / 4, left, top


@cache
def _letter_cover(character: str, unit: float, weight: float) -> Cover:
    """A letter whose left edge is at pixel 0 and whose base line is below pixel row -1."""
    segments: list[Segment] = []
    for line in glyph(character)[0]:
        segments += pairwise([(0.5 + x * unit, (y - 6) * unit) for x, y in line])
    return _cover(segments, weight)


def _advance(character: str) -> float:
    return glyph(character)[1] + 1.7


@cache
def _diagonals(scale: float) -> int:
    return max(4, round(6 * scale))


def _pattern_mask(
    name: str, left: int, top: int, width: int, height: int, scale: float
) -> np.ndarray:
    y, x = np.mgrid[top : top + height, left : left + width]
    period, pen = _diagonals(scale), max(1, round(scale))
    slash, back = (x + y) % period < pen, (x - y) % period < pen
    if name == "slash":
        return slash
    if name == "back":
        return back
    if name == "cross":
        return slash | back
    return (x % (period - 1) < pen + 1) & (y % (period - 1) < pen + 1)


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
