"""Flags made from the classes of options they set: one definition, with its types and the docstring under each field.

An options class has real defaults. For flags it must also be known which ones were *not* set, so that a recipe, a config
file or the resumed run can decide. Hence a second class, made here, in which every field is None unless the user set the flag.

A task's own options become flags too. Which task it is must be known before the command line is parsed, so `task_flags`
looks for it among the words: `brimful train mine.py:task rows.jsonl --depth 3`.
"""

import difflib
import keyword
import re
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, make_dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from brimful.errors import BadOption, TaskError, UserError
from brimful.planning.plan_options import PlanOptions
from brimful.tasks.load import BUILT_IN, RENAMED, check_spec, task_option_fields
from brimful.tasks.option_fields import OptionField, option_fields
from brimful.training.options import TrainOptions
from brimful.training.run import RunFolder, newest_run

RECIPES = "brimful.recipes"
TABLES = ("plan", "train")
"""Commands that a config file may have a table for."""
WITH_TASK = (*TABLES, "estimate")
"""Commands with the flags of a task."""
RUN_FLAGS = ("--run", "--run-dir")
NAMED = (*RUN_FLAGS, "--recipe", "--model")
"""Flags whose value may read like the name of a task: the recipe `pretrain`, a run `sft`."""
TITLES: dict[str, type] = {"Training": TrainOptions, "Memory and speed": PlanOptions}
TASK_TITLE = "Options of the task"
OTHER_FLAGS = {
    "help",
    "h",
    "json",
    "config",
    "recipe",
    "demo-data",
    "dry-run",
    "run-dir",
    "version",
    "gpu",
    "memory",
    "sharding",
    "levers",
}
OPTIMIZER_STATE = ("optimizer", "lr", "weight_decay", "ema")
"""Options of training that decide what the optimizer keeps in memory. `plan` and `estimate` have a flag for the first alone;
the others come from a config file."""
FILE_TASK = re.compile(r".+\.py:\w+")
KNOWN_TASKS = (*BUILT_IN, *RENAMED)

Switch = Annotated[bool, Parameter(negative="")]
Json = Annotated[bool, Parameter(negative="", help="Print one JSON object.")]
Device = Annotated[str, Parameter(help="cpu, cuda, cuda:1, mps or xpu; auto is the first accelerator, else the CPU.")]
MemoryLimit = Annotated[str | None, Parameter(help="Memory to use at most, such as 20GiB: reserved bytes on a GPU, a simulated limit on the CPU.")]  # fmt: skip
Fill = Annotated[float, Parameter(help="Share of the memory limit to use.")]


# ---- Options as flags ------------------------------------------------------------------------------------------------


def generic_names() -> list[str]:
    """The options that every task has."""
    return [option.name for owner in TITLES.values() for option in option_fields(owner)]


def make_flags(
    groups: Mapping[str, Sequence[OptionField]],
    *,
    types: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """A dataclass of flags for these options, by the title they have in the help. `types`, `helps` and `names` override."""
    flags: dict[str, Any] = {}
    for title, options in groups.items():
        for option in options:
            if option.name in flags:
                raise TaskError(f"the task's option {option.name} is an option of Brimful itself. Try: another name.")
            help_text = (helps or {}).get(option.name, option.help) + _default_text(option)
            parameter = Parameter(
                help=help_text,
                negative="" if option.default is False else None,
                group=title,
                name=(names or {}).get(option.name),
            )
            flags[option.name] = Annotated[(types or {}).get(option.name, option.type) | None, parameter]
    attributes = [(f"{name}_" if keyword.iskeyword(name) else name, hint, None) for name, hint in flags.items()]
    flags_class = make_dataclass("Flags", attributes, frozen=True, kw_only=True)
    flags_class.__module__ = __name__  # cyclopts does not take apart a class of the module `types`
    return Parameter(name="*")(flags_class)


def _default_text(option: OptionField) -> str:
    if option.required:
        return " [required]"
    return "" if option.default is None or isinstance(option.default, bool) else f" [default: {option.default}]"


def set_flags(flags: Any) -> dict[str, Any]:
    """The flags that the user set, by the option's name."""
    values = {field.name.rstrip("_"): getattr(flags, field.name) for field in fields(flags)}
    return {name: value for name, value in values.items() if value is not None}


def optimizer_flag() -> OptionField:
    """For `plan` and `estimate`: the state of the optimizer takes memory."""
    return next(option for option in option_fields(TrainOptions) if option.name == "optimizer")


def task_flags(tokens: Sequence[str]) -> tuple[OptionField, ...]:
    """The options of the task named on this command line, if it is needed: for help, or for a flag that is not Brimful's.

    A file's options come from a child process, which takes as long as the file's imports.
    """
    if not tokens or tokens[0] not in WITH_TASK:
        return ()
    task = _task_of(tokens[1:])
    unknown = _flag_names(tokens[1:]) - {name.replace("_", "-") for name in generic_names()} - OTHER_FLAGS
    help_requested = {"--help", "-h"} & set(tokens)
    is_named = len(tokens) > 1 and not tokens[1].startswith("-")
    if task is None and is_named and not help_requested and unknown & _language_flags():
        check_spec(tokens[1])  # a misspelt task has no options, and its name is what is wrong
    if task is None or not (task in BUILT_IN or unknown or help_requested):
        return ()
    return task_option_fields(task)


def _language_flags() -> set[str]:
    return {option.name.replace("_", "-") for option in task_option_fields("sft")}


def task_place(words: Sequence[str], without: Container[int] = ()) -> int | None:
    """Which of the words of a command is its task, with those at the places `without` left out."""
    for place, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        if before not in NAMED and place not in without and (word in KNOWN_TASKS or FILE_TASK.fullmatch(word)):
            return place
    return None


def _task_of(tokens: Sequence[str]) -> str | None:
    """The task among the words of a command, or that of the run which is resumed."""
    place = task_place(tokens)
    if place is not None:
        return RENAMED.get(tokens[place], tokens[place])  # so that the old name is answered, not its options
    run = None
    for index, token in enumerate(tokens):
        flag, equals, value = token.partition("=")
        if flag in RUN_FLAGS:
            run = value if equals else next(iter(tokens[index + 1 :]), None)
    with suppress(UserError):
        if run is not None or {"--resume", "--rollback"} & {token.partition("=")[0] for token in tokens}:
            return RunFolder(Path(run) if run is not None else newest_run(None)).read_request().task
    return None


def _flag_names(tokens: Sequence[str]) -> set[str]:
    names = {token[2:].partition("=")[0] for token in tokens if token.startswith("--") and len(token) > 2}
    return {name.removeprefix("no-") for name in names}


# ---- Options from files ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UserOptions:
    """What the user set, from flags, a config file and a recipe: Brimful's options, and the task's own."""

    generic: dict[str, Any]
    task: dict[str, Any]
    origins: dict[str, str]
    """For each option that a file has set, the file: `recipe small`, or its path."""

    @property
    def values(self) -> dict[str, Any]:
        return {**self.generic, **self.task}

    @property
    def optimizer(self) -> TrainOptions:
        """What decides on the optimizer's memory."""
        return TrainOptions(**{name: self.generic[name] for name in OPTIMIZER_STATE if name in self.generic})


def collect(
    command: str, flags: Any, *, config: Path | None, recipe: str | None = None, task: Callable[[], str | None]
) -> UserOptions:
    """Flags win over the config file, which wins over the recipe. `task` names the task if a file has options of its own."""
    generic = set(generic_names())
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, content in (_recipe(recipe), _config(config)):
        options = _table(content, command, source)
        if others := [name for name in options if name not in generic]:
            spec = task()
            known = [] if spec is None else [option.name for option in task_option_fields(spec)]
            _refuse_unknown([name for name in others if name not in known], [*generic, *known], source)
        values |= options
        origins |= dict.fromkeys(options, source.removeprefix("config=").replace("=", " "))
    values |= set_flags(flags)
    if "lengths" in values:
        values["lengths"] = parse_lengths(values["lengths"])
    return UserOptions(
        generic={name: value for name, value in values.items() if name in generic},
        task={name: value for name, value in values.items() if name not in generic},
        origins={name: origin for name, origin in origins.items() if name not in set_flags(flags)},
    )


def _recipe(name: str | None) -> tuple[str, dict[str, Any]]:
    if name is None:
        return "", {}
    files = {Path(file.name).stem: file for file in resources.files(RECIPES).iterdir() if file.name.endswith(".toml")}
    if name not in files:
        raise BadOption(
            f"recipe={name!r} is unknown. Try: {', '.join(sorted(files))}, or a file of yours with config=."
        )
    return f"recipe={name}", tomllib.loads(files[name].read_text(encoding="utf-8"))


def _config(path: Path | None) -> tuple[str, dict[str, Any]]:
    if path is None:
        return "", {}
    try:
        return f"config={path}", tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadOption(f"config={path} cannot be read: {reason}. Try: a TOML file such as the recipes.") from None


def _table(content: dict[str, Any], command: str, source: str) -> dict[str, Any]:
    """The top-level keys, and those of the command's own table."""
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    if other := [key for key in tables if key not in TABLES]:
        raise BadOption(f"{source} has the unknown table {', '.join(other)}. Try: {' or '.join(TABLES)}.")
    top = {key: value for key, value in content.items() if key not in tables}
    return {key.replace("-", "_"): value for key, value in {**top, **tables.get(command, {})}.items()}


def _refuse_unknown(names: Sequence[str], known: Sequence[str], source: str) -> None:
    if names:
        close = [match for name in names for match in difflib.get_close_matches(name, known, n=1)]
        advice = f" Try: {', '.join(close)}." if close else f" Try: one of {', '.join(sorted(known))}."
        raise BadOption(f"{source} has the unknown option {', '.join(names)}.{advice}")


def parse_lengths(value: Any) -> tuple[int, ...]:
    """`256,256`, or the list of a TOML file."""
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise BadOption(f"lengths={value} must be whole numbers separated by commas. Try: lengths=256,256.") from None
