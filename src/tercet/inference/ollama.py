"""An Ollama Modelfile: the model's chat template in Ollama's form, with its stops, parameters and system text.

A Jinja template is a program, Ollama's a Go template; one is not translated into the other by rules for every program.
Most templates only wrap each message in fixed texts, whatever the role. What these texts are is read off the template
by rendering marked messages; the result is kept only if it then renders dialogues as the template itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tercet.data.template import Messages
from tercet.errors import InputError

ROLES = ("system", "user", "assistant")
# What is said in place of a message, to find it again: letters alone, so that no template trims or escapes it.
MARKS = {"system": "qSYSTEMq", "user": "qUSERq", "assistant": "qASSISTANTq"}
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
DIALOGUES: tuple[Messages, ...] = (
    [{"role": "user", "content": "What is a prime?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "模型🙂?"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two,\nthree."},
        {"role": "user", "content": "Four {{ .Five }} <six>"},
    ],
    [
        {"role": "system", "content": "Line one.\nLine two."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ],
    [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}],
)

Render = Callable[[Messages, bool], str]  # (a chat, whether an answer is to begin) -> its text without the begin token


@dataclass(frozen=True)
class Wrapping:
    """What stands in front of and behind a message of each role, in front of an answer, and the system text that the
    template puts there when a chat brings none."""

    around: Mapping[str, tuple[str, str]]
    answer: str
    system: str | None

    def render(self, messages: Messages) -> str:
        """Return what Ollama makes of a chat with `go_template` and SYSTEM."""
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        texts = [self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages]
        return "".join(texts) + self.answer

    def go_template(self) -> str:
        """Return the template. Raises InputError for texts that Ollama's file cannot hold."""
        for text in (*(t for pair in self.around.values() for t in pair), self.answer):
            if "{{" in text or "}}" in text or '"""' in text:
                raise InputError(
                    f"the chat template's text {text!r} cannot stand in an Ollama Modelfile", "Take --format gguf."
                )
        parts = []
        for role in ROLES:
            before, after = self.around[role]
            word = "if" if not parts else "else if"
            parts.append(f'{{{{ {word} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}')
        return "{{ range .Messages }}" + "".join(parts) + "{{ end }}{{ end }}" + self.answer


def find_wrapping(render: Render) -> Wrapping:
    """Return how a template wraps messages. Raises InputError when it does more than that."""
    try:
        wrapping = _read_off(render)
    except InputError as error:
        raise _untranslated(f"it refuses a plain chat: {error.message}") from None
    except ValueError:
        raise _untranslated("it does more than wrap each message in fixed texts") from None
    for dialogue in DIALOGUES:
        if wrapping.render(dialogue) != render(dialogue, True):
            raise _untranslated("what it makes of a chat is not each message in fixed texts")
    return wrapping


def _untranslated(why: str) -> InputError:
    return InputError(
        f"the chat template has no equal in an Ollama Modelfile: {why}",
        "Take --format gguf, whose file holds the template as it is.",
    )


def _read_off(render: Render) -> Wrapping:
    """Raises ValueError where a mark is missing or stands twice."""
    user, system, assistant = ({"role": r, "content": MARKS[r]} for r in ("user", "system", "assistant"))
    first, between, rest = _cut(render([user, assistant, user], False), user)
    before_answer, middle = _cut(between, assistant)
    after_answer = _cut(render([user, assistant], False), assistant)[1]
    after_user = rest
    begin = middle.removeprefix(after_answer)
    answer = _cut(render([user], True), user)[1].removeprefix(after_user)
    before_system, behind = _cut(render([system, user], False), system)
    after_system = _cut(behind, user)[0].removesuffix(begin)
    lead = first.removesuffix(begin)  # a system text of the template's own, or nothing
    own = None
    if lead:
        if not (before_system and lead.startswith(before_system) and lead.endswith(after_system)):
            raise ValueError
        own = lead[len(before_system) : len(lead) - len(after_system)]
    around = {
        "system": (before_system, after_system),
        "user": (begin, after_user),
        "assistant": (before_answer.removeprefix(after_user), after_answer),
    }
    return Wrapping(around, answer, own)


def _cut(text: str, message: Mapping[str, str]) -> list[str]:
    return text.split(message["content"])


def modelfile(
    wrapping: Wrapping | None, stops: Sequence[str], settings: Mapping[str, Any], context_tokens: int, gguf: str
) -> str:
    """Return the file. Without a wrapping the model continues texts. settings: those of generation_config.json."""
    lines = [f"FROM ./{gguf}"]
    if wrapping is None:
        lines.append('TEMPLATE "{{ .Prompt }}"')
    else:
        lines.append(f'TEMPLATE """{wrapping.go_template()}"""')
        if wrapping.system is not None:
            lines.append(f'SYSTEM """{wrapping.system}"""')
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    lines.append(f"PARAMETER num_ctx {context_tokens}")
    if settings.get("do_sample") is False:  # Ollama draws at 0.8 unless it is told
        settings = {"temperature": 0}
    for ours, theirs in PARAMETERS.items():
        if isinstance(value := settings.get(ours), int | float) and not isinstance(value, bool):
            lines.append(f"PARAMETER {theirs} {value:g}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    if '"' in text or "\n" in text:
        raise InputError(f"the stop text {text!r} cannot stand in an Ollama Modelfile", "Take --format gguf.")
    return f'"{text}"'
