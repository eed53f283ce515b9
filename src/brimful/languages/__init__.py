"""Headings and sentences in the user's language: English, or Chinese with `--lang zh` or `LANG=zh_CN.UTF-8`.

The code writes English, and so do files that programs read: `plan.json`, `events.jsonl`, `--json`. Only what people look at is
translated, at the moment it is shown:

    tr("{rows} rows per step", rows=256)      a template of a view: looked up, then filled in
    translate("the whole step fits without it")  a finished sentence, such as a plan's reason or a line of events.jsonl

Both use one catalogue, the TOML files in `zh/`: `"English template" = "中文模板"`. For `translate`, each template also serves as a
pattern: `{reason}` matches a text, which is translated in turn; `{path!s}` matches a text and keeps it as it is, `{error!a}` even
one of several sentences, `{name!r}` only one word, and `{count:,}` a figure such as `1,024`, `85%`, `256+256` or `3 min 20 s`. A
sentence that no template matches is taken apart at its punctuation. What the catalogue lacks stays English.
"""

import itertools
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

VARIABLE = "BRIMFUL_LANG"
"""Set by `--lang`, so that the processes that train see it too."""
_VARIABLES = (VARIABLE, "LC_ALL", "LC_MESSAGES", "LANG")
_PLACEHOLDER = re.compile(r"\{(\w+)([:!][^}]*)?\}")
_UNIT = r"(?:[KMGT]?i?B|ms|s|min|h)"
_FIGURE = rf"[-+≥]?\d[\d.,+%e-]*(?: ?{_UNIT}(?: \d+ {_UNIT})?)?"
_STOP = r"\. (?=[A-Z]|[a-z_]+=)"
_MATCHES = {None: rf"(?:(?!; |{_STOP}).)+?", "!s": rf"(?:(?!; |{_STOP}).)+?", "!a": r".+?", "!r": r"\S+"}
"""The pattern of a placeholder, by its conversion."""
_BLANK = re.compile(r"(?<=[\u4e00-\u9fff])\0(?=[A-Za-z0-9'\"./-])|(?<=[A-Za-z0-9%'\"./)-])\0(?=[\u4e00-\u9fff])")
_IDEOGRAM = re.compile(r"[\u4e00-\u9fff]")
_STRONG_BREAKS = ((re.compile(r"\n"), "\n"), (re.compile(_STOP), "。"), (re.compile("; "), "；"))
"""Breaks between parts that are translated each on its own, with the Chinese for each break."""
_WEAK_BREAKS = (
    (re.compile(": "), "："),
    (re.compile(", or "), "，或"),
    (re.compile(", but "), "，但"),
    (re.compile(", (?:and )?"), "，"),
    (re.compile(" and "), "和"),
    (re.compile(" or "), "或"),
    (re.compile(r" (?=\()"), ""),
)
"""Breaks between parts that are translated all or not at all: half a sentence in English is harder to read than a whole one."""
_COMMAND = re.compile(r"`[^`]*`|\bbrimful(?: [a-z-]+)+")
_ENGLISH = re.compile(r"\b[a-z']+ [a-z']+ [a-z']+\b")
"""Three English words in a row: a sentence, not a name or a unit."""

_chosen: Language | None = None


def set_language(language: Language | None) -> None:
    """Show everything in this language from now on; None: as the environment says."""
    global _chosen
    _chosen = language


def language() -> Language:
    """`set_language`'s, else the first of BRIMFUL_LANG, LC_ALL, LC_MESSAGES and LANG that is set; English by default."""
    if _chosen is not None:
        return _chosen
    value = next((text for name in _VARIABLES if (text := os.environ.get(name))), "")
    return "zh" if value.lower().startswith("zh") else "en"


def tr(template: str, **values: Any) -> str:
    """The template in the user's language, with these values filled in. Counts among them (`8 rows`) are translated too."""
    if language() == "en":
        return template.format(**values) if values else template
    translated = _catalogue().get(template, template)
    counts = {
        name: translate(value) for name, value in values.items() if isinstance(value, str) and value[:1].isdigit()
    }
    return translated.format(**{**values, **counts}) if values else translated


def translate(sentence: str) -> str:
    """A finished English sentence in the user's language, as far as the catalogue has its parts."""
    return sentence if language() == "en" else _translated(sentence)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A template and what to fill in, kept apart until it is shown: `str` is English, as `--json` has it.

    A value may be a sentence or a list of them; a plain text stays as it is. Without values it is a finished sentence.
    """

    template: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        values = {name: _joined(value, ", ", str) for name, value in self.values.items()}
        return self.template.format(**values) if values else self.template

    def shown(self) -> str:
        """In the user's language."""
        if not self.values:
            return translate(self.template)
        comma = "，" if language() == "zh" else ", "
        return tr(self.template, **{name: _joined(value, comma, _shown) for name, value in self.values.items()})


def say(template: str, **values: Any) -> Sentence:
    """`say("{free} free", free="3 GiB")`."""
    return Sentence(template, values)


def _joined(value: Any, comma: str, text: Callable[[Any], str]) -> Any:
    if isinstance(value, (list, tuple)):
        return comma.join(map(text, value))
    return text(value) if isinstance(value, Sentence) else value


def _shown(value: Any) -> str:
    return value.shown() if isinstance(value, Sentence) else str(value)


@lru_cache(maxsize=4096)  # parts come again and again while a sentence is taken apart in several ways
def _translated(sentence: str) -> str:
    if not any(map(str.isalpha, sentence)):
        return sentence
    known = _catalogue().get(sentence)
    if known is not None and "{" not in known:
        return known
    stopped = sentence.endswith(".")  # else the last placeholder of a template would take the full stop
    for fixed, template in _templates():
        if fixed not in sentence or (stopped and not template.endswith(".")):
            continue
        pattern, translated = _pattern(template)
        if match := pattern.fullmatch(sentence):
            parts = match.groupdict()
            parts |= {name: _translated(parts[name]) for name in translated}
            if not any(_has_english(parts[name]) for name in translated):
                return _fill_in(_catalogue()[template], parts)
    return _translated_in_parts(sentence)


def _translated_in_parts(sentence: str) -> str:
    """The sentence split at the first kind of break whose parts can be translated; unchanged if there is none."""
    for last, chinese in ((".", "。"), (":", "："), (",", "，")):
        if sentence.endswith(last) and (changed := _translated(sentence[:-1])) != sentence[:-1]:
            return changed + (last if _has_english(re.split(r"。|\. ", changed)[-1]) else chinese)
    if sentence.startswith("(") and sentence.endswith(")"):
        inner = _translated(sentence[1:-1])
        return f"（{inner}）" if inner != sentence[1:-1] else sentence
    outside = _without_parentheses(sentence)
    for mark, chinese in _STRONG_BREAKS:
        parts, breaks = _split(sentence, outside, mark)
        translated = [_translated(part) for part in parts]
        if translated != parts:
            ends = [chinese if _IDEOGRAM.search(part) else end for part, end in zip(translated, breaks, strict=True)]
            return "".join(itertools.chain(*zip(translated, (*ends[:-1], ""), strict=True)))
    for mark, chinese in _WEAK_BREAKS:
        parts, _ = _split(sentence, outside, mark)
        translated = [_translated(part) for part in parts]
        connects = len(parts) > 1 and _IDEOGRAM.search(chinese)  # an English word, which goes even if the parts stay
        if (translated != parts or connects) and not any(map(_has_english, translated)):
            return _with_blanks(f"\0{chinese}\0".join(translated))
    return sentence


def _has_english(text: str) -> bool:
    return bool(_ENGLISH.search(_COMMAND.sub("", text)))


def _split(sentence: str, outside: str, mark: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts between the marks, and what stands after each; none if there is no mark."""
    places = [place for match in mark.finditer(outside) for place in match.span()]
    if not places:
        return [], []
    parts = [sentence[start:end] for start, end in itertools.pairwise([0, *places, len(sentence), len(sentence)])]
    return parts[::2], parts[1::2]


def _without_parentheses(sentence: str) -> str:
    """The sentence with everything in parentheses replaced by NUL characters, so that breaks in there are not found."""
    depth, text = 0, ""
    for character in sentence:
        depth -= character == ")"
        text += "\0" if depth > 0 else character
        depth += character == "("
    return text


def _fill_in(template: str, values: dict[str, str]) -> str:
    return _with_blanks(_PLACEHOLDER.sub(lambda place: f"\0{values.get(place[1], place[0])}\0", template))


def _with_blanks(marked: str) -> str:
    """Chinese is set with a blank between its own characters and others. `\\0` marks where one may be needed."""
    return _BLANK.sub(" ", marked).replace("\0", "")


@cache
def _catalogue() -> dict[str, str]:
    return dict(_entries())


def _entries() -> Iterator[tuple[str, str]]:
    for file in sorted(resources.files(__name__).joinpath("zh").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            for table in tomllib.loads(file.read_text(encoding="utf-8")).values():
                yield from ((english, _with_formats(english, chinese)) for english, chinese in table.items())


def _with_formats(english: str, chinese: str) -> str:
    """`{rows}` as `{rows:,}` where the English has it, so that a catalogue need not repeat how numbers are written."""
    formats = {place[1]: place[2] for place in _PLACEHOLDER.finditer(english) if (place[2] or "").startswith(":")}
    return _PLACEHOLDER.sub(
        lambda place: place[0] if place[2] else f"{{{place[1]}{formats.get(place[1], '')}}}", chinese
    )


@cache
def _templates() -> list[tuple[str, str]]:
    """The templates with placeholders and the longest fixed piece of each, those with the most fixed text first."""
    pieces = {template: _PLACEHOLDER.split(template)[::3] for template in _catalogue()}
    templates = [template for template, fixed in pieces.items() if len(fixed) > 1]
    templates.sort(key=lambda template: sum(map(len, pieces[template])), reverse=True)
    longest = [(max(pieces[template], key=len), template) for template in templates]
    return [(fixed, template) for fixed, template in longest if fixed]  # else a part could be as long as the whole


@cache
def _pattern(template: str) -> tuple[re.Pattern[str], frozenset[str]]:
    """What the template matches, and its placeholders that are translated in turn."""
    fixed, *rest = _PLACEHOLDER.split(template)
    pattern, translated = re.escape(fixed), dict[str, bool]()
    for name, kind, fixed in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        matches = _FIGURE if kind and kind[0] == ":" else _MATCHES[kind]
        pattern += (f"(?P={name})" if name in translated else f"(?P<{name}>{matches})") + re.escape(fixed)
        translated[name] = kind is None
    return re.compile(pattern, re.DOTALL), frozenset(name for name in translated if translated[name])
