"""How a recipe is read: defaults, YAML file, `key=value` overrides; every value knows the line it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tercet.errors import InputError, nearest
from tercet.spec.recipe.effect import HINT, idle, idle_sentence
from tercet.spec.recipe.sections import Recipe, model_word, strategy_word
from tercet.spec.recipe.wording import explain, place_of, section_names


def shipped_recipes() -> dict[str, Path]:
    """Return name -> file of the recipes that come with the package."""
    folder = Path(str(resources.files("tercet") / "recipes"))
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: a path, or the name of a shipped one. Raises InputError with nearest names."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(name) in shipped:
        return shipped[str(name)]
    if path.suffix in (".yaml", ".yml") or path.exists():
        raise InputError(f"recipe {str(name)!r} is not a file")
    raise InputError(
        f"no recipe {str(name)!r}{nearest(str(name), shipped)}",
        f"Give a YAML file or one of the shipped recipes: {', '.join(shipped)}.",
    )


def load_run_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a run folder's recipe.yaml as load_recipe does, but for keys in it that cannot act: no reason to refuse a
    run that has trained with them; they fall back to their defaults.
    """
    return load_recipe(path, overrides, of_run=True)


def load_recipe(name: str | Path, overrides: Iterable[str] = (), *, of_run: bool = False) -> Recipe:
    """Read a recipe and apply `key=value` overrides.

    Raises InputError that names file and line (or the override), the value seen and what is allowed.
    """
    path = find_recipe(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8", "Save the recipe as UTF-8.") from None
    tree, lines = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise InputError(f"{path}: a recipe is a mapping of sections ({', '.join(section_names())})")
    tree.setdefault("name", path.stem)
    if of_run:
        _forget_ranks(tree)
    return build_recipe(tree, overrides, lines, of_run)


def _forget_ranks(tree: dict[str, Any]) -> None:
    """Drop what `data` beside shards (zero 1 to 3) says in a run's recipe: once the number of ranks, which plan.json
    has as well; no run can have begun with the replicas of shards that it would mean today.
    """
    strategy = tree.get("strategy")
    if isinstance(strategy, dict) and strategy.get("zero") in ("1", "2", "3"):
        strategy.pop("data", None)


def with_place(
    error: InputError, name: str | Path, overrides: Iterable[str] = (), *, always: bool = False
) -> InputError:
    """Return an error that begins with a recipe's key with the file and line, or the override, that the key is from.

    `always`: one that names neither the recipe nor a key of it begins with the recipe's name.
    """
    if not (found := _KEY.match(error.message)):
        return (
            InputError(f"{name}: {error.message}", error.hint) if always and str(name) not in error.message else error
        )
    key, rest = found[0], error.message[found.end() :]
    path = shipped_recipes().get(str(name), Path(name).expanduser())
    if not path.is_file() or path.suffix not in (".yaml", ".yml"):  # data, prepared without a recipe
        return error
    _, lines = read_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    for override in overrides:
        lines[override.partition("=")[0].strip()] = f"{override!r} on the command line"
    if key not in lines and ".0" in key:  # a list of one that was written as a word
        key = re.sub(r"\.0\b", "", key)
    place = place_of(key.split("."), lines)
    return InputError(f"{place}: {key}{rest}", error.hint) if place else error


_SECTIONS = "|".join(Recipe.model_fields)
_KEY = re.compile(rf"(?:{_SECTIONS})(?:(?:\.\w+)+(?=[: ])|(?=:))")  # "data.train: …", "train.steps is …", "model: …"

# One length of a run on the command line takes the place of the file's other one.
INSTEAD = {"train.steps": "train.epochs", "train.epochs": "train.steps"}


def build_recipe(
    tree: dict[str, Any], overrides: Iterable[str] = (), lines: dict[str, str] | None = None, of_run: bool = False
) -> Recipe:
    """Validate a plain tree of values. `lines` maps a dotted key to the "file, line n" it came from.

    `of_run`: keys of the tree that cannot act are dropped, not refused.
    """
    lines = dict(lines or {})
    # A section before its keys: data.train=f data.train.0.map=… mean the same in either order.
    overrides = sorted(overrides, key=lambda override: override.partition("=")[0].count("."))
    given = {override.partition("=")[0].strip() for override in overrides}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise InputError(f"{override!r} is not key=value", "For example: train.steps=100")
        key = key.strip()
        _set(tree, key, _override_value(value, override))
        lines[key] = f"{override!r} on the command line"
        if (other := INSTEAD.get(key)) and other not in given and isinstance(tree.get("train"), dict):
            tree["train"].pop(other.partition(".")[2], None)
    recipe = _validated(tree, lines)
    for key, _, rule in idle(recipe):
        if not _said(key, given) and (of_run or any(_said(decides, given) for decides in rule.by)):
            _take_out(tree, key)
    recipe = _validated(tree, lines)
    if wrong := idle(recipe):
        sentences = (idle_sentence(key, value, rule.needs) for key, value, rule in wrong)
        places = (f"{place}: " if (place := place_of(key.split("."), lines)) else "" for key, _, _ in wrong)
        raise InputError("\n".join(map("".join, zip(places, sentences, strict=True))), HINT)
    return recipe


def _validated(tree: dict[str, Any], lines: dict[str, str]) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise InputError("\n".join(explain(error, lines))) from None


def _said(key: str, given: set[str]) -> bool:
    """Whether the command line gave a key, or a section that it is in."""
    parts = key.split(".")
    return any(".".join(parts[: n + 1]) in given for n in range(len(parts)))


def _take_out(tree: Any, key: str) -> None:
    """Take a key of the file out of the tree, wherever a section was not written as a word."""
    *path, last = key.split(".")
    for part in path:
        if isinstance(tree, list):
            tree = tree[int(part)]
        elif isinstance(tree, dict):
            tree = tree.get(part)
    if isinstance(tree, dict):
        tree.pop(last, None)


MOST_VALUES = 20_000


def read_yaml(text: str, name: str) -> tuple[Any, dict[str, str]]:
    """Return (values, dotted key -> "name, line n"); every scalar stays text. Raises InputError with the line."""
    lines = {"": name}
    seen = 0

    def value(node: yaml.Node, key: str) -> Any:
        nonlocal seen
        seen += 1
        if seen > MOST_VALUES:  # a few lines of aliases can mean more values than fit in memory
            raise InputError(f"{name}: more than {MOST_VALUES} values once its aliases are written out")
        if key:
            lines[key] = f"{name}, line {node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for k, v in node.value:
                child = f"{key}.{k.value}" if key else str(k.value)
                if k.value in result:
                    raise InputError(f"{name}, line {k.start_mark.line + 1}: {child} is given twice")
                result[k.value] = value(v, child)
                lines[child] = f"{name}, line {k.start_mark.line + 1}"
            return result
        if isinstance(node, yaml.SequenceNode):
            return [value(v, f"{key}.{i}") for i, v in enumerate(node.value)]
        return None if node.tag.endswith(":null") else node.value

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise InputError(f"{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(f"{name}: sections within sections without end") from None
    try:
        return ({} if node is None else value(node, "")), lines
    except RecursionError:
        raise InputError(f"{name}: sections within sections without end") from None


def _override_value(text: str, override: str) -> Any:
    text = text.strip()
    if text.startswith(("[", "{")):  # lists and sections in YAML's flow form; anything else is taken as it stands
        return read_yaml(text, f"{override!r} on the command line")[0]
    return None if text in ("", "null") else text


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at the dotted key. A word in the way (strategy: zero2) becomes its section first."""
    *path, last = key.split(".")
    if path[:2] == ["data", "train"] and len(path) > 2:
        _set_of_source(tree, path[2], ".".join([*path[3:], last]), value)
        return
    for depth, part in enumerate(path):
        child = tree.get(part)
        if depth == 0 and part == "strategy" and isinstance(child, str):
            child = dict(_strategy_word_or_input_error(child))
        elif depth == 0 and part == "model" and isinstance(child, str):
            child = dict(model_word(child))
        elif depth == 0 and part == "adapter" and isinstance(child, str):
            child = {"kind": child}
        elif not isinstance(child, dict):
            child = {}
        tree[part] = child = dict(child)
        tree = child
    tree[last] = value


def _set_of_source(tree: dict[str, Any], number: str, key: str, value: Any) -> None:
    """Put `value` at the key of one source of data.train: data.train.0.map. Raises InputError where there is no such source."""
    section = tree.get("data")
    said: Any = section.get("train") if isinstance(section, dict) else None
    sources: list[Any] = [
        {"path": s} if isinstance(s, str) else s for s in (said if isinstance(said, list) else [said])
    ]
    if not number.isdecimal() or int(number) >= len(sources) or not isinstance(sources[int(number)], dict):
        raise InputError(f"data.train.{number}.{key}: data.train has no source {number}", "Sources are counted from 0.")
    own: dict[str, Any] = dict(sources[int(number)])
    sources[int(number)] = own
    _set(own, key, value)
    assert isinstance(section, dict)
    tree["data"] = {**section, "train": sources}


def _strategy_word_or_input_error(word: str) -> dict[str, Any]:
    try:
        return strategy_word(word)
    except ValueError as error:
        raise InputError(f"strategy: {error}") from None
