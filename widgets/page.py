"""Pictures as HTML: a still that shows anywhere, and the player where scripts may run."""

from __future__ import annotations

import base64
import gzip
import json
from html import escape
from typing import Any

from widgets.assets import page_js, shorten

_LOADER = """\
(async () => {
  const bytes = Uint8Array.from(atob("%s"), (c) => c.charCodeAt(0));
  const unzipped = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  new Function(await new Response(unzipped).text())();
})();"""

_PAGE = """\
<!DOCTYPE html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 16px; background: #ffffff; color: #1b1f24; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #14171c; color: #e6e9ed; }} }}
</style>
</head>
<body>
{body}
<script>
(() => {{
{script}
}})();
</script>
</body>
</html>
"""

_script_is_out = False


def snippet(state: dict[str, Any], picture: bytes, alt: str, *, script: bool | None = None) -> str:
    """An output cell's HTML. The image comes first, so that it is there where all else is
    stripped. The player's script goes with the first picture of a session only.
    """
    global _script_is_out
    if script is None:
        script = not _script_is_out
        _script_is_out = True
    parts = [f'<div data-minibatch="1">{still(picture, alt)}', _data(state), "</div>"]
    if script:
        packed = gzip.compress(shorten(page_js(state["lang"])).encode(), 9, mtime=0)
        parts.append(f"<script>{_LOADER % base64.b64encode(packed).decode()}</script>")
    else:
        parts.append("<script>window.minibatch && window.minibatch.start();</script>")
    return "".join(parts)


def still(picture: bytes, alt: str) -> str:
    """The image alone."""
    image = base64.b64encode(picture).decode()
    return (
        f'<img class="mb-still-picture" alt="{escape(alt, quote=True)}" '
        f'style="max-width:100%;background:#ffffff" src="data:image/png;base64,{image}"/>'
    )


def forget_script() -> None:
    """The next picture brings the script again (a new notebook in the same process)."""
    global _script_is_out
    _script_is_out = False


def whole_page(state: dict[str, Any], title: str, alt: str) -> str:
    """A page of its own: works from a disk, without a network or a kernel."""
    holder = f'<div data-minibatch="1" aria-label="{escape(alt, quote=True)}">{_data(state)}</div>'
    script = page_js(state["lang"]).replace("</script", "<\\/script")
    return _PAGE.format(lang=state["lang"], title=escape(title), body=holder, script=script)


def _data(state: dict[str, Any]) -> str:
    plain = {**state, "series": [dict(entry) for entry in state["series"]]}
    for entry in plain["series"]:
        entry["data"] = base64.b64encode(entry["data"]).decode()
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return f'<script type="application/json">{text}</script>'
