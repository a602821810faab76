"""Weights that a run began with are told from others, small and large, whatever their folder is called."""

from __future__ import annotations

from tercet.weights import fingerprint as module
from tercet.weights.fingerprint import fingerprint


def test_other_numbers_and_other_sizes_are_seen(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    seen = set()
    for content in (b"a" * 5000, b"a" * 4999, b"a" * 4999 + b"b"):
        file.write_bytes(content)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 3
    moved = tmp_path.with_name("elsewhere")
    tmp_path.rename(moved)
    assert fingerprint(moved) in seen and fingerprint(moved / "model.safetensors") in seen
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)  # of a large one, blocks are read to its end
    monkeypatch.setattr(module, "BLOCK_BYTES", 10)
    monkeypatch.setattr(module, "EVERY_BYTES", 100)
    whole = fingerprint(moved)
    (moved / "model.safetensors").write_bytes(b"a" * 4905 + b"b" * 95)
    assert fingerprint(moved) != whole
