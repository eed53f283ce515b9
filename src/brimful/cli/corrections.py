"""Old names on a command line and in a config file, answered in one message with the corrected command.

    $ brimful train sft rows.jsonl --learning_rate 5e-5 --per_device_train_batch_size 32 --gradient_accumulation_steps 2
    brimful: error B101: 3 options come from other programs.
      --learning_rate is now --lr, the peak.
      …
    Try: brimful train sft rows.jsonl --lr 5e-5 --global-batch 64

A name that the command or its task accepts is never treated as an old one: a user's task may have an option `template`. No old
name is accepted silently, since some of these options mean something else here.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import App

from brimful.cli.flags import TABLES, generic_names, task_place
from brimful.cli.old_names import BRIMFUL, CHATLM, FALSE, OLD_NAMES, SWITCH, TRUE, OldName
from brimful.errors import BadOption
from brimful.languages import tr
from brimful.tasks.load import BUILT_IN, RENAMED, task_option_fields

_YAML_LINE = re.compile(r"([A-Za-z_]\w*):[ \t]+([^#\n]+?)[ \t]*(?:#.*)?")
CHAT_TASK = "sft"
_TAKES_WORD = ("TASK", "DATA", "FILES")


@dataclass(frozen=True, kw_only=True)
class OldOption:
    """An old name where the user wrote it."""

    old: OldName
    shown: str
    """`--learning_rate`, or `learning_rate in my.toml`."""
    flag: str | None
    """The option now, for this command; None if there is none."""
    value: str
    place: int | None = None
    """The index of its word on the command line; None in a file."""
    words: int = 1
    """How many words it takes there."""

    @property
    def new_value(self) -> str | None:
        return self.old.convert(self.value)

    @property
    def new_name(self) -> str:
        """`--precision` of `--precision bf16`; empty if there is no option now."""
        return (self.flag or "").split(" ")[0]


def refuse_old_names(app: App, tokens: Sequence[str]) -> None:
    """Raise one `BadOption` if the command line, or the file of --config, has names of other programs or of an earlier Brimful."""
    chain, apps, rest = app.parse_commands(list(tokens))
    if not chain or chain[0] not in (*TABLES, "data") or chain[-1].startswith("-") or apps[-1].default_command is None:
        return  # another command, or its help
    command = _Command(
        chain, rest, {name for argument in apps[-1].assemble_argument_collection() for name in argument.names}
    )
    on_line, in_file = list(command.on_line()), list(command.in_file())
    if not on_line and not in_file:
        return
    raise BadOption(command.message(on_line, in_file))


class _Command:
    """A command line: the names of the command, its words, and what it accepts."""

    def __init__(self, chain: Sequence[str], words: Sequence[str], accepted: set[str]) -> None:
        self.chain, self.words = list(chain), list(words)
        self.is_data = chain[0] == "data"
        self.accepted = {_plain(name) for name in accepted}
        self.renamed: list[str] = []
        self.task: str | None = None
        self._find_task()
        self.config = self._config()

    # ---- Finding ----

    def _find_task(self) -> None:
        """The task, under its present name. The value of an old option is none: `--stage sft`."""
        values = {
            option.place + word
            for option in self.on_line()
            if option.place is not None
            for word in range(1, option.words)
        }
        place = task_place(self.words, without=values)
        if place is None:
            return
        if new := RENAMED.get(self.words[place]):
            self.renamed = [tr("{name} is now {flag}.", name=self.words[place], flag=new)]
            self.words[place] = new
        self.task = self.words[place]

    def on_line(self) -> Iterator[OldOption]:
        place = 0
        while place < len(self.words):
            option = self._at(place)
            if option is not None:
                yield option
            place += option.words if option else 1

    def _at(self, place: int) -> OldOption | None:
        word = self.words[place]
        if not word.startswith("--") or len(word) < 3:
            return None
        written, equals, value = word[2:].partition("=")
        name, count = _plain(written), 1
        if name in self.accepted:
            return None
        off = name.removeprefix("no_") if name.startswith("no_") and name not in OLD_NAMES else None
        old = OLD_NAMES.get(off or name)
        if old is None or (self.is_data and old.data_flag is None):
            return None
        following = self.words[place + 1] if place + 1 < len(self.words) else "--"
        if off is not None:
            value = "false"
        elif not equals and _is_value(following, old):
            value, count = following, 2
            if old.name == "report_to":  # the one that takes several words
                count = 1 + len(_until_flag(self.words[place + 1 :]))
                value = ",".join(self.words[place + 1 : place + count])
        old = old.for_data() if self.is_data else old
        return OldOption(old=old, shown=f"--{written}", flag=old.flag, value=value, place=place, words=count)

    def in_file(self) -> Iterator[OldOption]:
        if self.config is None:
            return
        known = {_plain(name) for name in [*generic_names(), *self._task_options()]}
        for key, value in _read(self.config, self.chain[0]).items():
            name = _plain(key)
            if name not in known and name in OLD_NAMES:
                old, text = OLD_NAMES[name], _text(value)
                yield OldOption(old=old, shown=f"{key} in {self.config}", flag=_as_key(old.flag), value=text)

    def _config(self) -> Path | None:
        """The file of --config; also one of LLaMA-Factory's, which is the first word there."""
        for place, word in enumerate(self.words):
            flag, equals, value = word.partition("=")
            if flag == "--config":
                return Path(value if equals else self.words[place + 1] if place + 1 < len(self.words) else "")
        first = self.words[0] if self.words else ""
        return Path(first) if first.endswith((".yaml", ".yml")) and Path(first).is_file() else None

    def _task_options(self) -> list[str]:
        return [option.name for option in task_option_fields(self.task or CHAT_TASK)]

    def _is_accepted(self, flag: str) -> bool:
        """A task that is not named yet is taken for a chat task, as those of ChatLM and LLaMA-Factory are."""
        name = flag.split()[0]
        if name in _TAKES_WORD or _plain(name) in self.accepted:
            return True
        return self.task is None and not self.is_data and _plain(name) in map(_plain, self._task_options())

    # ---- Answering ----

    def message(self, on_line: Sequence[OldOption], in_file: Sequence[OldOption]) -> str:
        every = [*on_line, *in_file]
        rows = self._rows_per_step(every)
        sentences = [*self.renamed, *(self._sentence(option, rows) for option in every)]
        advice = self._advice(on_line, in_file, rows)
        advice = tr("Try: {advice}", advice=advice) if advice else ""
        if len(sentences) == 1 and "\n" not in advice:
            return f"{sentences[0]}{' ' * (advice != '' and not sentences[0].endswith('。'))}{advice}"
        others, count = sum(option.old.source != BRIMFUL for option in every), len(sentences)
        if others == count:
            heading = (
                "1 option comes from other programs." if count == 1 else "{count} options come from other programs."
            )
        else:
            heading = (
                "{count} names have changed or come from other programs." if others else "{count} names have changed."
            )
        return "\n".join(
            [tr(heading, count=count), *(f"  {sentence}" for sentence in sentences), *filter(None, [advice])]
        )

    def _sentence(self, option: OldOption, rows: int | None) -> str:
        values: dict[str, Any] = {
            "name": option.shown,
            "flag": option.flag,
            "note": tr(option.old.note),
            "rows": rows,
        }
        if rows is not None and option.old.part and option.value.isdigit():
            if option.old.part != "batch":
                return tr("{name} is now {flag}, {note}, here {rows}.", **values)
            kept = "global_batch =" if option.place is None else "--global-batch"
            return tr("{name} is now {flag}, {note}. {kept} {rows} keeps the rows of a step.", kept=kept, **values)
        if option.flag is None or option.place is None or self._is_accepted(option.flag):
            sentence = option.old.sentence(option.shown, option.flag)
        elif self.chain[0] == "plan":
            sentence = tr("{name} is not needed: a plan does not depend on {flag} of `brimful train`.", **values)
        else:
            sentence = tr("{name} is not available: {task} has no option {flag}.", task=self.task, **values)
        if option.new_value is None and option.value and option.flag is not None:
            end = tr("{value} has no equivalent.", value=option.value)
            sentence = f"{sentence.rstrip('.。')}{tr('; ')}{end}"
        return sentence

    def _advice(self, on_line: Sequence[OldOption], in_file: Sequence[OldOption], rows: int | None) -> str:
        """The corrected command, with what it leaves out, and the lines of the corrected file; empty if nothing can be corrected."""
        parts, lost = [], [option for option in on_line if self._is_lost(option, rows)]
        if len(lost) < len(on_line) and (line := self._corrected(on_line, lost, rows)):
            names = tr(", ").join(option.shown for option in lost)
            parts += [line, *([tr("This leaves out {names}.", names=names)] if lost else [])]
        if in_file:
            rows = None if any(option.old.part for option in on_line) else rows
            lines = [f"{name} = {literal}" for name, literal in self._file_lines(in_file, rows)]
            is_yaml = self.config is not None and self.config.suffix in (".yaml", ".yml")
            where = tr("in a TOML file write") if is_yaml else tr("in {file} write", file=self.config)
            parts += ["\n    ".join([where, *lines])] if lines else []
        return "\n".join(parts)

    def _rows_per_step(self, every: Sequence[OldOption]) -> int | None:
        """Rows per device × accumulation × processes, where the numbers are there. ChatLM's scripts forced an accumulation of 16, so
        that its rows per device alone do not tell."""
        factors = {option.old.part: int(option.value) for option in every if option.old.part and option.value.isdigit()}
        tell = any(option.old.part == "batch" and option.old.source != CHATLM for option in every)
        if "batch" not in factors or not (tell or "accumulation" in factors):
            return None
        processes = [option.new_value for option in every if option.flag == "--processes"] + self._values("--processes")
        count = next((int(text) for text in processes if text and text.isdigit()), 1)
        return factors["batch"] * factors.get("accumulation", 1) * count

    def _values(self, flag: str) -> list[str]:
        pairs = zip(self.words, [*self.words[1:], ""], strict=True)
        return [value for word, value in pairs if word == flag] + [
            word.partition("=")[2] for word in self.words if word.startswith(f"{flag}=")
        ]

    def _is_lost(self, option: OldOption, rows: int | None) -> bool:
        """Whether it has no equivalent here, so that a command without it asks for something else."""
        if option.old.verdict == "not available" or option.new_value is None:
            return True
        if option.old.part or option.old.verdict != "now":
            return option.old.part == "accumulation" and rows is None
        return bool(option.new_value) and self.chain[0] != "plan" and not self._is_accepted(option.new_name)

    def _corrected(self, on_line: Sequence[OldOption], lost: Sequence[OldOption], rows: int | None) -> str | None:
        """Without what is lost; None if two options say different things."""
        taken = {index for option in on_line for index in range(option.place or 0, (option.place or 0) + option.words)}
        kept = [word for index, word in enumerate(self.words) if index not in taken]
        options: dict[str, str] = {}
        for option in on_line:
            value, flag = option.new_value or "", option.new_name
            if option in lost or option.old.verdict != "now" or option.old.part or not value:
                continue
            if not self._is_accepted(flag):  # of training, in a plan
                continue
            if flag == "--lora" and flag in options:  # one flag there for each of its parts
                value = f"{options.pop(flag)},{value}"
            if options.get(flag, value) != value or self._values(flag):
                return None
            options[flag] = value
            options |= {name: text for name, text in option.old.also(option.value).items() if not self._values(name)}
        if rows is not None and any(option.old.part for option in on_line) and not self._values("--global-batch"):
            options["--global-batch"] = str(rows)
        if any(word.startswith("--") and _plain(word.partition("=")[0]) not in self.accepted for word in kept):
            return None
        front = [options.pop(name) for name in _TAKES_WORD if name in options]
        kept = [*front, *kept] if self.is_data else self._with_task_and_data(kept, options, front)
        flags = [word for flag, value in options.items() for word in ([flag] if value == SWITCH else [flag, value])]
        return " ".join(_quoted(word) for word in ["brimful", *self.chain, *kept, *flags])

    def _with_task_and_data(self, kept: list[str], options: dict[str, str], front: list[str]) -> list[str]:
        """TASK and DATA come first; what is missing stands there as a word to fill in."""
        if self.task is not None:
            place = kept.index(self.task)
            has_data = place + 1 < len(kept) and not kept[place + 1].startswith("-")
            data = [word for word in front if word not in BUILT_IN]
            return kept if has_data else [*kept[: place + 1], *data, *kept[place + 1 :]]
        leading = list(_until_flag(kept))
        if leading and leading[0].endswith(".py"):  # `./train_low_mem.py train`: the old script and its command
            kept = kept[1 + (leading[1:2] == ["train"]) :]
            leading = list(_until_flag(kept))
        if "--resume" in options or "--resume" in kept:
            return kept
        of_chat_tasks = any(_plain(flag) not in self.accepted for flag in options)
        task = [word for word in front if word in BUILT_IN] or [CHAT_TASK if of_chat_tasks else "TASK"]
        data = leading or [word for word in front if word not in BUILT_IN] or ["DATA"]
        if "--demo-data" in kept:
            data = []
        return [*task, *data, *kept[len(leading) :]]

    def _file_lines(self, in_file: Sequence[OldOption], rows: int | None) -> Iterator[tuple[str, str]]:
        for option in in_file:
            value, flag = (
                option.new_value,
                (option.old.flag or "").split(" ")[0],
            )  # `option.flag` is as a file writes it
            if option.old.verdict == "now" and value and not option.old.part and flag.startswith("--"):
                yield _plain(flag), _literal("true" if value == SWITCH else value)
                yield from ((_plain(name), text) for name, text in option.old.also(option.value).items())
        if rows is not None and any(option.old.part for option in in_file):
            yield "global_batch", str(rows)


def _as_key(flag: str | None) -> str | None:
    """`--precision bf16` as it is written in a file: `precision = "bf16"`."""
    if flag is None or not flag.startswith("--"):
        return flag
    name, _, value = flag.partition(" ")
    return f'{_plain(name)} = "{value}"' if value else _plain(name)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _is_value(word: str, old: OldName) -> bool:
    """Whether the word after an option belongs to it. After a switch only true and false do."""
    if word.startswith("--"):
        return False
    if old.name == "resume_from_checkpoint":
        return True
    return word.lower() in (*TRUE[:-1], *FALSE) if old.switch else True


def _until_flag(words: Sequence[str]) -> list[str]:
    end = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:end])


def _quoted(word: str) -> str:
    """`columns` has an equals sign, which the printed message would take for an argument unless it is quoted."""
    return f"'{word}'" if "=" in word and not word.startswith("-") and "'" not in word else shlex.quote(word)


def _read(path: Path, command: str) -> dict[str, Any]:
    """The options of a TOML file, or of a flat YAML file; empty if it cannot be read, which is reported later."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            matches = [_YAML_LINE.fullmatch(line.strip()) for line in text.splitlines()]
            return {match[1]: match[2] for match in matches if match}
        content = tomllib.loads(text)
    except (OSError, ValueError):
        return {}
    top = {key: value for key, value in content.items() if not isinstance(value, dict)}
    table = content.get(command, {})
    return {**top, **table} if isinstance(table, dict) else top


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value).strip("'\"")


def _literal(value: str) -> str:
    """As TOML writes it."""
    if value in ("true", "false") or re.fullmatch(r"-?\d+(\.\d*)?(e-?\d+)?", value, re.IGNORECASE):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
