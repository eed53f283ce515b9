"""The documentation says the same in both languages, and the commands it shows exist."""

import ast
import itertools
import re
import shlex
from pathlib import Path

import pytest
from cyclopts import App, CoercionError, CycloptsError, MissingArgumentError

from brimful.cli.app import make_app
from brimful.errors import BrimfulError, InternalError, UserError
from brimful.units import GiB
from tests.test_catalogue import kinds
from tests.test_readme import blocks

ROOT = Path(__file__).parents[1]
DOCS, CHINESE = ROOT / "docs", ROOT / "docs/zh"
PAGES = sorted(CHINESE.glob("*.md"))
SAME = ("from-chatlm.md", "errors.md")
"""Chinese pages that are translations of an English one."""
OTHER_FLAGS = {"--shm-size", "--ipc", "--multi", "--num", "--is", "--use", "--batch", "--learn", "--best"}
"""Of docker, and of the old scripts as far as their first underscore."""
OTHER_PROGRAMS = {"hf", "export", "pip", "torchrun", "accelerate", "make"}


def shown(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """The commands of the console blocks, without those that are shown for the error they end in."""
    found = []
    for block in blocks(text, "console"):
        lines = [*block.splitlines(), ""]
        for line, after in itertools.pairwise(lines):
            if line.startswith("$ ") and not after.startswith("brimful: "):
                found.append(line.removeprefix("$ ").split("  #")[0].strip())
    return found


def named_commands(text: str) -> list[str]:
    """All that a page tells to type: in its console blocks, and `brimful …` in its sentences and tables."""
    inline = re.findall(r"`(brimful [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return commands(text) + [one for one in inline if "…" not in one]


def flags(text: str) -> set[str]:
    """Every flag that a page names."""
    return set(
        re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    )


@pytest.mark.parametrize("name", SAME)
def test_both_languages_show_the_same_commands_and_code(name):
    english, chinese = shown(DOCS / name), shown(CHINESE / name)
    assert commands(english) == commands(chinese)
    assert blocks(english, "python") == blocks(chinese, "python")


@pytest.mark.parametrize("name", SAME)
def test_both_languages_name_the_same_commands_in_their_text(name):
    """In any order, and each as often as a sentence needs it."""
    english, chinese = (set(named_commands(shown(folder / name))) for folder in (DOCS, CHINESE))
    assert english ^ chinese == set()


@pytest.mark.parametrize("name", SAME)
def test_both_languages_have_the_same_tables(name):
    rows = [re.findall(r"^\|", shown(folder / name), re.MULTILINE) for folder in (DOCS, CHINESE)]
    assert len(rows[0]) == len(rows[1])


@pytest.mark.parametrize(
    "page", [*PAGES, DOCS / "errors.md", DOCS / "from-chatlm.md"], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_every_command_that_is_named_exists_with_its_flags(page):
    for command in named_commands(shown(page)):
        program, *tokens = shlex.split(command.split(" && ")[0].split(" > ")[0])
        if program in OTHER_PROGRAMS:
            continue
        assert program == "brimful", command
        _parse(tokens, command)


def _parse(tokens: list[str], command: str) -> None:
    tokens = _without_language(tokens)
    if not tokens or tokens == ["--help"]:
        return
    try:
        _, _, unused, *_ = make_app(tokens).parse_known_args(tokens)
    except (MissingArgumentError, CoercionError):
        return  # something that the reader fills in is missing, or stands for a number
    except CycloptsError as error:
        raise AssertionError(f"{command}: {error}") from None
    assert not [one for one in unused if one.startswith("-")], command


def _without_language(tokens: list[str]) -> list[str]:
    at = tokens.index("--lang") if "--lang" in tokens else None
    return tokens if at is None else tokens[:at] + tokens[at + 2 :]


@pytest.mark.parametrize("wrong", ["plan sft --no-such-flag 3", "wach", "data chek rows.jsonl"])
def test_a_command_that_does_not_exist_is_noticed(wrong):
    with pytest.raises(AssertionError):
        _parse(wrong.split(), f"brimful {wrong}")


@pytest.mark.parametrize("page", [*PAGES, DOCS / "errors.md"], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_flag_in_the_text_exists(page):
    known = _flags_of(make_app(["train", "sft"])) | {"--help", "--lang", "--traceback"}
    assert flags(shown(page)) - known - OTHER_FLAGS == set()


def _flags_of(app: App) -> set[str]:
    """Of a command and of those below it."""
    own = [] if app.default_command is None else app.assemble_argument_collection()
    below = [_flags_of(app[name]) for name in app if not name.startswith("-")]
    return {name for argument in own for name in argument.names}.union(*below)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_that_is_linked_is_there(page):
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", shown(page)):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [*PAGES, DOCS / "errors.md"], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_section_that_is_linked_is_there(page):
    titles = {title.strip().lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", shown(page), re.MULTILINE)}
    for anchor in re.findall(r"\]\(#([^)]+)\)", shown(page)):
        assert anchor in titles, anchor


def test_the_index_lists_every_chinese_page():
    assert set(re.findall(r"^\| \[([\w-]+\.md)\]", shown(CHINESE / "index.md"), re.MULTILINE)) == {
        page.name for page in PAGES
    } - {"index.md"}


def codes() -> dict[str, str]:
    """By code, the class of `errors.py` that has it."""
    own = [kind for kind in (*kinds(UserError), InternalError) if kind.__module__ == "brimful.errors"]
    return {kind.code: kind.__name__ for kind in own}


@pytest.mark.parametrize("folder", [DOCS, CHINESE], ids=["English", "Chinese"])
def test_the_page_of_errors_explains_every_code_and_no_other(folder):
    text = shown(folder / "errors.md")
    assert dict(re.findall(r"^### (B\d+)\n\n`(\w+)`", text, re.MULTILINE)) == codes()
    assert dict(re.findall(r"^\| \[(B\d+)\]\(#b\d+\) \| `(\w+)`", text, re.MULTILINE)) == codes()


@pytest.mark.parametrize("folder", [DOCS, CHINESE], ids=["English", "Chinese"])
def test_every_code_has_causes_and_a_remedy(folder):
    sections = re.split(r"^### B\d+$", shown(folder / "errors.md"), flags=re.MULTILINE)[1:]
    assert all("What to do:" in one or "怎么办：" in one for one in sections)
    assert (
        sum("Causes:" in one or "常见原因：" in one for one in sections) == len(sections) - 1
    )  # our own mistakes have none


def test_a_subclass_elsewhere_has_the_code_of_its_parent():
    assert all(kind.code in codes() for kind in kinds(BrimfulError))


def test_the_figures_of_the_oom_page_follow_from_the_shapes():
    text = shown(CHINESE / "oom.md")
    for rows, gib in ((32, "1.23"), (24, "0.92")):
        assert f"{rows * 252 * 40_960 * 4 / GiB:.2f}" == gib and f"{gib} GiB" in text
    assert f"{3.18 / (14.94 + 3.18):.1%}" == "17.5%" and "17.5 %" in text


def test_accumulation_saves_nothing():
    (row,) = re.findall(r"^\| 只增大累积 \|(.*)$", shown(CHINESE / "oom.md"), re.MULTILINE)
    assert row.split("|")[0].strip().startswith("**0**")


COMMANDS = {"cli"}
"""Packages whose other modules are a command each."""


@pytest.mark.parametrize("package", sorted(path.parent for path in (ROOT / "src/brimful").glob("*/**/__init__.py")), ids=lambda path: path.name)  # fmt: skip
def test_a_package_lists_its_modules(package):
    """As CONTRIBUTING.md says."""
    docstring = ast.get_docstring(ast.parse(shown(package / "__init__.py"))) or ""
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    missing = {name for name in modules if not re.search(rf"(?<!\w){name}(?!\w)", docstring)}
    assert not missing or package.name in COMMANDS
