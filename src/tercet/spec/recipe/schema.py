"""The JSON schema of a recipe file, for editors."""

from __future__ import annotations

from typing import Any

from tercet.spec.recipe.built import BUILT, runs
from tercet.spec.recipe.sections import WORDS, Recipe


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, for editors. Words stand where a section may be shortened.

    It offers what this version runs: of a key in BUILT only the values there, of the words only those that mean them.
    """
    schema = Recipe.model_json_schema()
    for key, built in BUILT.items():
        field = _field(schema, key)
        for rule in field.keys() - {"title", "description", "default"}:
            del field[rule]
        field["enum"] = list(built)
    properties = schema["properties"]
    for name, words in (
        ("strategy", {"enum": [word for word in WORDS if runs(WORDS[word])]}),
        ("model", {}),
        ("adapter", {"enum": ["none", "lora"]}),
    ):
        properties[name] = {"anyOf": [{"type": "string", **words}, properties[name]]}
    definitions = schema["$defs"]
    source = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/SourceSection"}]}
    many = [*source["anyOf"], {"type": "array", "items": source}]
    data = definitions["DataSection"]["properties"]
    data["train"] = {"anyOf": many}
    data["validation"] = {
        "anyOf": [*many, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "null"}]
    }
    # A count may carry a unit (4k, 1_000), so wherever a number is wanted a text that reads as one is accepted.
    number_text = {"type": "string", "pattern": r"^[+-]?[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?[kKmMgGbBtT]?i?[bB]?$"}

    def allow_units(node: Any) -> None:
        if isinstance(node, dict):
            for key, child in list(node.items()):
                if key == "properties":
                    for name, field in child.items():
                        if isinstance(field, dict) and field.get("type") in ("integer", "number"):
                            rest = {
                                k: field.pop(k) for k in list(field) if k not in ("title", "description", "default")
                            }
                            field["anyOf"] = [rest, number_text]
                        child[name] = field
                allow_units(child)
        elif isinstance(node, list):
            for child in node:
                allow_units(child)

    allow_units(schema)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Tercet recipe"
    schema["required"] = ["data"]
    return schema


def _field(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the schema of a dotted key, its sections followed into the definitions."""
    node = schema
    *sections, last = key.split(".")
    for section in sections:
        node = schema["$defs"][node["properties"][section]["$ref"].rpartition("/")[2]]
    return node["properties"][last]
