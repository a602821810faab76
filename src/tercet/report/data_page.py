"""A page about prepared data: the report, a picture of the lengths, rows as the model will see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ name }}: data</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8884; border-radius: 6px; padding: .7rem; }
.trained { background: #2a82; color: inherit; font-weight: 600; }
.read { opacity: .6; }
svg text { font-size: 11px; fill: currentColor; }
</style></head><body>
<h1>{{ name }}</h1>
<pre>{{ lines | join("\n") }}</pre>
{% if bars %}<h2>Lengths in tokens</h2>
<svg viewBox="0 0 600 {{ 20 * bars | length }}" role="img" aria-label="documents by length">
{% for bar in bars %}<text x="0" y="{{ 20 * loop.index0 + 14 }}">up to {{ bar.edge }}</text>
<rect x="110" y="{{ 20 * loop.index0 + 3 }}" width="{{ bar.width }}" height="13" fill="#28a"></rect>
<text x="{{ 116 + bar.width }}" y="{{ 20 * loop.index0 + 14 }}">{{ bar.count }}</text>
{% endfor %}</svg>{% endif %}
{% if samples %}<h2>As the model will see it</h2>
<p>Marked: trained. Pale: read, not trained.</p>
{% for sample in samples %}<h3>Document {{ sample.number }}, {{ sample.tokens }} tokens, {{ sample.trained }} trained</h3>
<p>{{ sample.path }}</p>
<pre>{% for piece in sample.pieces %}<span class="{{ 'trained' if piece.weight else 'read' }}"
{%- if piece.weight not in (0, 1) %} title="weight {{ piece.weight }}"{% endif %}>{{ piece.text }}</span>{% endfor %}</pre>
{% endfor %}{% endif %}
</body></html>
"""


def data_page(name: str, lines: Sequence[str], figures: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the page. `lines`, `figures`: the report on prepared data; `samples`: documents (data/show.py)."""
    bins = [(edge, count) for edge, count in figures["lengths"].get("histogram", []) if count]
    most = max((count for _, count in bins), default=1)
    bars = [{"edge": edge, "count": count, "width": round(430 * count / most, 1)} for edge, count in bins]
    return Environment(autoescape=True).from_string(_PAGE).render(name=name, lines=lines, bars=bars, samples=samples)
