"""`Check`: one finding about the machine, with what to do about it.

Sentences keep their template and their values apart until they are shown, so that `--json` has them in English and the screen in
the user's language.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from brimful.languages import language, tr, translate

Status = Literal["ok", "warning", "failed", "not checked"]
Group = Literal["Software", "Cards", "Several processes", "Host", "Folders", "Environment"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A template of the catalogue and what to fill in. A value may be a sentence, or a list of them; a plain text stays as it is."""

    template: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """In English."""
        values = {name: _joined(value, ", ", str) for name, value in self.values.items()}
        return self.template.format(**values) if values else self.template

    def shown(self) -> str:
        """In the user's language."""
        separator = "，" if language() == "zh" else ", "
        return tr(self.template, **{name: _joined(value, separator, _shown) for name, value in self.values.items()})


@dataclass(frozen=True, slots=True)
class Foreign:
    """A sentence of another part of Brimful, finished already: the catalogue knows it as a whole or not at all."""

    text: str

    def __str__(self) -> str:
        return self.text

    def shown(self) -> str:
        return translate(self.text)


def say(template: str, **values: Any) -> Sentence:
    """`say("{free} free", free="3 GiB")`."""
    return Sentence(template, values)


def _joined(value: Any, separator: str, text: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return separator.join(text(one) for one in value)
    return text(value) if isinstance(value, (Sentence, Foreign)) else value


def _shown(value: Any) -> str:
    return value.shown() if isinstance(value, (Sentence, Foreign)) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One finding."""

    group: Group
    name: str | Sentence
    """What was looked at: `torch`, `cuda:0`, `/dev/shm`."""
    status: Status
    text: Sentence
    """What was found, or why it was not looked at."""
    fix: Sentence | None = None
    """What to try; every warning and failure has one."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind it, for `--json`."""

    @property
    def title(self) -> str:
        """The name in the user's language."""
        return tr(self.name) if isinstance(self.name, str) else self.name.shown()

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "name": str(self.name),
            "status": self.status,
            "text": str(self.text),
            "fix": None if self.fix is None else str(self.fix),
            "figures": dict(self.figures),
        }


class Findings(list[Check]):
    """The checks of one group, in the order in which they are added."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group: Group = group

    def ok(self, name: str | Sentence, text: Sentence, /, **figures: Any) -> None:
        self.append(Check(group=self.group, name=name, status="ok", text=text, figures=figures))

    def warn(self, name: str | Sentence, text: Sentence, fix: Sentence, /, **figures: Any) -> None:
        """It works, but slowly, or not for long."""
        self.append(Check(group=self.group, name=name, status="warning", text=text, fix=fix, figures=figures))

    def fail(self, name: str | Sentence, text: Sentence, fix: Sentence, /, **figures: Any) -> None:
        """A training would not start, or would end."""
        self.append(Check(group=self.group, name=name, status="failed", text=text, fix=fix, figures=figures))

    def skip(self, name: str | Sentence, text: Sentence, /, **figures: Any) -> None:
        """Not checked, and why."""
        self.append(Check(group=self.group, name=name, status="not checked", text=text, figures=figures))
