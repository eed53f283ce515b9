"""Headings and sentences in the user's language: English, or Chinese with `--lang zh` or `LANG=zh_CN.UTF-8`.

The code writes English, and so do files that programs read: `plan.json`, `events.jsonl`, `--json`. Only what people look at is
translated, at the moment it is shown:

    tr("{rows} rows per step", rows=256)      a template of a view: looked up, then filled in
    translate("the whole step fits without it")  a finished sentence, such as a plan's reason or a line of events.jsonl

Both use one catalogue, the TOML files in `zh/`: `"English template" = "中文模板"`. For `translate`, each template also serves as a
pattern: `{reason}` matches any text, which is translated in turn; `{path!s}` matches any text and keeps it as it is; `{name!r}`
does so for one word, and `{count:,}` for a figure such as `1,024`, `85%`, `256+256` or `3 min 20 s`. A sentence that no template
matches is taken apart at its punctuation. What the catalogue lacks stays English.
"""

import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

VARIABLE = "BRIMFUL_LANG"
"""Set by `--lang`, so that the processes that train see it too."""
_VARIABLES = (VARIABLE, "LC_ALL", "LC_MESSAGES", "LANG")
_PLACEHOLDER = re.compile(r"\{(\w+)([:!][^}]*)?\}")
_UNIT = r"(?:[KMGT]?i?B|ms|s|min|h)"
_FIGURE = rf"[-+≥]?\d[\d.,+%e-]*(?: {_UNIT}(?: \d+ {_UNIT})?)?"
_MATCHES = {None: r"(?:(?!; ).)+?", "!s": r".+?", "!r": r"\S+"}
"""What a placeholder stands for, by its conversion."""
_BLANK = re.compile(r"(?<=[\u4e00-\u9fff])\0(?=[A-Za-z0-9'\"./-])|(?<=[A-Za-z0-9%'\"./)-])\0(?=[\u4e00-\u9fff])")
"""Chinese is set with a blank between its own characters and others."""
_BREAKS = (
    (re.compile(r"\n"), "\n"),
    (re.compile(r"; "), "；"),
    (re.compile(r"\. (?=[A-Z])"), "。"),
    (re.compile(r": "), "："),
    (re.compile(r", or "), "，或 "),
    (re.compile(r", but "), "，但"),
    (re.compile(r", (?:and )?"), "，"),
    (re.compile(r" (?=\()"), ""),
    (re.compile(r" and "), "和"),
)
"""Where a sentence that matches no template is taken apart, the strongest break first, and what joins the parts again."""
_PARENTHESES = re.compile(r"\([^()]*\)")
_MOST_NESTED = 12

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
    found = _catalogue().get(template, template)
    counts = {
        name: translate(value) for name, value in values.items() if isinstance(value, str) and value[:1].isdigit()
    }
    return found.format(**{**values, **counts}) if values else found


def translate(sentence: str) -> str:
    """A finished English sentence in the user's language, as far as the catalogue has its parts."""
    return sentence if language() == "en" else _translated(sentence, _MOST_NESTED)


def _translated(sentence: str, depth: int) -> str:
    if not depth or not any(map(str.isalpha, sentence)):
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
            return _fill_in(
                _catalogue()[template], parts | {name: _translated(parts[name], depth - 1) for name in translated}
            )
    return _translated_in_parts(sentence, depth - 1)


def _translated_in_parts(sentence: str, depth: int) -> str:
    """Taken apart at the first kind of break after which some part is known; the sentence itself if none is."""
    for last, chinese in ((".", "。"), (":", "："), (",", "，")):
        if sentence.endswith(last) and (changed := _translated(sentence[:-1], depth)) != sentence[:-1]:
            return changed + chinese
    if sentence.startswith("(") and sentence.endswith(")"):
        inner = _translated(sentence[1:-1], depth)
        return f"（{inner}）" if inner != sentence[1:-1] else sentence
    outside = _PARENTHESES.sub(lambda inner: "(" + "\0" * (len(inner[0]) - 2) + ")", sentence)
    for mark, chinese in _BREAKS:
        ends = [0, *(place for match in mark.finditer(outside) for place in match.span()), len(sentence)]
        parts = [sentence[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True)]
        if len(parts) > 1 and (changed_parts := [_translated(part, depth) for part in parts]) != parts:
            return chinese.join(changed_parts)
    return sentence


def _fill_in(template: str, values: dict[str, str]) -> str:
    marked = _PLACEHOLDER.sub(lambda place: f"\0{values.get(place[1], place[0])}\0", template)
    return _BLANK.sub(" ", marked).replace("\0", "")


@cache
def _catalogue() -> dict[str, str]:
    return dict(_entries())


def _entries() -> Iterator[tuple[str, str]]:
    for file in sorted(resources.files(__name__).joinpath("zh").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            for table in tomllib.loads(file.read_text(encoding="utf-8")).values():
                yield from table.items()


@cache
def _templates() -> list[tuple[str, str]]:
    """The templates with placeholders and the longest fixed piece of each, those with the most fixed text first."""
    pieces = {template: _PLACEHOLDER.split(template)[::3] for template in _catalogue()}
    templates = [template for template, fixed in pieces.items() if len(fixed) > 1]
    templates.sort(key=lambda template: sum(map(len, pieces[template])), reverse=True)
    return [(max(pieces[template], key=len), template) for template in templates]


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
