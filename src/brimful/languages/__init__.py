"""Headings and sentences in the user's language: English, or Chinese with `--lang zh` or `LANG=zh_CN.UTF-8`.

The code writes English, and so do files that programs read: `plan.json`, `events.jsonl`, `--json`. Only what people look at is
translated, at the moment it is shown:

    tr("{rows} rows per step", rows=256)      a template of a view: looked up, then filled in
    translate("the whole step fits without it")  a finished sentence, such as a plan's reason or a line of events.jsonl

Both use one catalogue, the TOML files in `zh/`: `"English template" = "中文模板"`. For `translate`, each template also serves as a
pattern, and what its placeholders matched is translated in turn. What the catalogue lacks stays English.
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

_VARIABLES = ("BRIMFUL_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
_PLACEHOLDER = re.compile(r"\{(\w+)(?:[:!][^}]*)?\}")
_BREAKS = re.compile(r"(; |\. (?=[A-Z])|, (?=and |but )|\n)")
"""Where a sentence that is not in the catalogue as a whole is taken apart."""
_BREAKS_ZH = {"; ": "；", ". ": "。", "\n": "\n"}
_MOST_NESTED = 3

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
    """The template in the user's language, with these values filled in."""
    found = _catalogue().get(template, template) if language() == "zh" else template
    return found.format(**values) if values else found


def translate(sentence: str) -> str:
    """A finished English sentence in the user's language, as far as the catalogue has its parts."""
    return sentence if language() == "en" else _translated(sentence, _MOST_NESTED)


def _translated(sentence: str, depth: int) -> str:
    if not depth or not sentence:
        return sentence
    known = _catalogue().get(sentence)
    if known is not None and "{" not in known:
        return known
    for pattern, template in _patterns():
        if match := pattern.fullmatch(sentence):
            values = {name: _translated(text, depth - 1) for name, text in match.groupdict().items()}
            return _fill_in(template, values)
    parts = _BREAKS.split(sentence)
    if len(parts) == 1:
        return sentence
    texts, breaks = parts[::2], [*(_BREAKS_ZH.get(part, part) for part in parts[1::2]), ""]
    return "".join(_translated(text, depth - 1) + after for text, after in zip(texts, breaks, strict=True))


def _fill_in(template: str, values: dict[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda place: values.get(place[1], place[0]), template)


@cache
def _catalogue() -> dict[str, str]:
    return dict(_entries())


def _entries() -> Iterator[tuple[str, str]]:
    for file in sorted(resources.files(__name__).joinpath("zh").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            for table in tomllib.loads(file.read_text(encoding="utf-8")).values():
                yield from table.items()


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Templates with placeholders as patterns, those with the most fixed text first."""
    templates = [(english, chinese) for english, chinese in _catalogue().items() if _PLACEHOLDER.search(english)]
    templates.sort(key=lambda pair: len(_PLACEHOLDER.sub("", pair[0])), reverse=True)
    return [(_pattern(english), chinese) for english, chinese in templates]


def _pattern(template: str) -> re.Pattern[str]:
    pieces, last, seen = [], 0, set[str]()
    for place in _PLACEHOLDER.finditer(template):
        name = place[1]
        pieces.append(re.escape(template[last : place.start()]))
        pieces.append(f"(?P={name})" if name in seen else f"(?P<{name}>(?:(?!; ).)+?)")
        seen.add(name)
        last = place.end()
    return re.compile("".join([*pieces, re.escape(template[last:])]), re.DOTALL)
