"""What a user writes: the sections of a recipe, how files and command lines are read into them, how faults are worded.

Read in this order: defaults, YAML file, `key=value` from the command line. Every scalar reaches pydantic as text and is
read by the declared type, so `1e-4`, `1_000`, `4k` and `24GB` mean the same in both places.
"""

from tercet.spec.recipe.built import unbuilt
from tercet.spec.recipe.effect import refuse_idle_for
from tercet.spec.recipe.loading import (
    build_recipe,
    find_recipe,
    load_recipe,
    load_run_recipe,
    read_yaml,
    shipped_recipes,
    with_place,
)
from tercet.spec.recipe.schema import json_schema
from tercet.spec.recipe.sections import (
    WORDS,
    AdapterSection,
    DataSection,
    ModelSection,
    OptimSection,
    OutputSection,
    Recipe,
    SourceSection,
    StrategySection,
    TrainSection,
)

__all__ = [
    "WORDS",
    "AdapterSection",
    "DataSection",
    "ModelSection",
    "OptimSection",
    "OutputSection",
    "Recipe",
    "SourceSection",
    "StrategySection",
    "TrainSection",
    "build_recipe",
    "find_recipe",
    "json_schema",
    "load_recipe",
    "load_run_recipe",
    "read_yaml",
    "refuse_idle_for",
    "shipped_recipes",
    "unbuilt",
    "with_place",
]
