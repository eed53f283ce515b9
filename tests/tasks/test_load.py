"""From what the user typed to a task, and one sentence for every way that fails."""

import sys

import pytest

from brimful.errors import BadOption, TaskError, UnknownTask
from brimful.task import Task
from brimful.tasks.load import BUILT_IN, load_task, task_option_fields


@pytest.fixture(autouse=True)
def _imports_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("brimful_task_mine", "neighbour_of_mine"):
        sys.modules.pop(name, None)


@pytest.fixture
def write(tmp_path):
    """Write a task file and get its path: `write("x = 3")`."""

    def writer(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text("from brimful import Task\n" + text)
        return str(tmp_path / name)

    return writer


ONE_TASK = """
class Mine(Task):
    worst_shape = (7,)

instance = Mine()
instance.worst_shape = (9,)

def make():
    return instance
"""


def refused(error: type[Exception], spec: str, **options) -> str:
    with pytest.raises(error) as raised:
        load_task(spec, options=options)
    assert type(raised.value) is error
    return str(raised.value)


def test_the_built_in_names():
    assert list(BUILT_IN) == ["pretrain", "sft", "dpo"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_task_is_called_what_the_user_typed(name):
    assert load_task(name, {"model": "chatlm-tiny"}).name == name


@pytest.mark.parametrize("name", ["pretrain", "sft"])
@pytest.mark.parametrize(
    ("model", "shape", "global_batch"), [("chatlm-tiny", (128, 128), 64), ("chatlm-base", (256, 256), 256)]
)
def test_a_built_in_task_has_the_lengths_and_the_batch_of_its_preset(name, model, shape, global_batch):
    task = load_task(name, options={"model": model})
    assert (task.worst_shape, task.global_batch) == (shape, global_batch)


def test_pretraining_makes_the_base_model_unless_told(tmp_path):
    task = load_task("pretrain", options={"model": None})
    assert (task.worst_shape, task.global_batch) == ((256, 256), 256)
    assert task.config.d_model == 768


@pytest.mark.parametrize("options", [{}, {"model": None}], ids=str)
def test_fine_tuning_has_no_model_unless_told(options):
    said = refused(BadOption, "sft", **options)
    assert said.startswith("sft needs a model to fine-tune, and model= is missing. Try: a model folder, a run, ")


@pytest.mark.parametrize("model", ["huge", ""])
def test_a_model_that_does_not_exist_names_the_presets_that_do(model):
    said = refused(BadOption, "sft", model=model)
    assert said.startswith(f"model={model!r} does not exist. Try: ") and "chatlm-tiny, chatlm-base" in said


def test_a_task_in_a_file_is_taken_as_it_is(write):
    task = load_task(f"{write(ONE_TASK)}:instance")
    assert (type(task).__name__, task.worst_shape) == ("Mine", (9,))


def test_a_class_in_a_file_is_made_into_a_task(write):
    task = load_task(f"{write(ONE_TASK)}:Mine")
    assert isinstance(task, Task)
    assert task.worst_shape == (7,)


def test_a_function_in_a_file_is_called_for_its_task(write):
    assert load_task(f"{write(ONE_TASK)}:make").worst_shape == (9,)


def test_a_file_may_import_its_neighbours(write):
    write("width = 5", name="neighbour_of_mine.py")
    path = write("import neighbour_of_mine\nclass Mine(Task):\n    worst_shape = (neighbour_of_mine.width,)")
    assert load_task(f"{path}:Mine").worst_shape == (5,)


def test_a_file_is_found_from_the_current_folder(write, monkeypatch, tmp_path):
    write(ONE_TASK)
    monkeypatch.chdir(tmp_path)
    assert load_task("mine.py:Mine").worst_shape == (7,)


def test_a_file_in_a_folder_with_a_colon_in_its_name_is_found(tmp_path):
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b" / "mine.py").write_text("from brimful import Task\nclass Mine(Task): ...")
    assert load_task(f"{tmp_path}/a:b/mine.py:Mine").name == "Mine"


def test_a_file_that_changed_is_run_anew(write):
    load_task(f"{write(ONE_TASK)}:Mine")
    assert load_task(f"{write(ONE_TASK.replace('(7,)', '(70,)'))}:Mine").worst_shape == (70,)


def test_a_file_can_use_dataclasses_and_postponed_annotations(tmp_path):
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom brimful import Task\n"
    (tmp_path / "mine.py").write_text(text + "@dataclass\nclass Mine(Task):\n    width: int = 3\n")
    assert load_task(f"{tmp_path}/mine.py:Mine").width == 3


def test_a_misspelt_name_gets_a_suggestion():
    assert refused(UnknownTask, "stf") == "there is no task 'stf'. Try: sft."
    assert refused(UnknownTask, "chatlm-stf") == "there is no task 'chatlm-stf'. Try: sft."


@pytest.mark.parametrize("name", ["pretrain", "sft"])
def test_the_name_that_a_task_had_is_answered_with_its_new_one(name):
    said = refused(UnknownTask, f"chatlm-{name}")
    assert said == f"the task chatlm-{name} is now {name}, with the model it trains. Try: {name} DATA --model MODEL."


@pytest.mark.parametrize("spec", ["resnet", "", "tasks.mine:Task", "mine.txt:Task"])
def test_an_unknown_name_like_no_other_gets_no_suggestion(spec):
    message = f"there is no task {spec!r}. Try: pretrain, sft, dpo, or file.py:name."
    assert refused(UnknownTask, spec) == message


def test_a_file_without_a_name_is_told_how_to_name_one(write):
    path = write(ONE_TASK)
    assert refused(UnknownTask, path).startswith(f"{path} is a file. Try: {path}:name")


def test_a_missing_file_is_named():
    assert refused(UnknownTask, "nowhere/mine.py:Mine").startswith("there is no file nowhere/mine.py")


def test_a_name_that_is_not_in_the_file_lists_the_tasks_that_are(write):
    path = write(ONE_TASK)
    assert refused(UnknownTask, f"{path}:Mien") == f"{path} has no 'Mien'. Try: Mine, instance."


def test_a_name_that_is_not_in_a_file_without_tasks_says_so(write):
    path = write("width = 5")
    assert (
        refused(UnknownTask, f"{path}:Mine") == f"{path} has no 'Mine'. Try: define a subclass of brimful.Task in it."
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", " at {path}:2: ZeroDivisionError: division by zero"),
        ("import no_such_package", " at {path}:2: ModuleNotFoundError: No module named 'no_such_package'"),
        ("class Mine(Task)", ": SyntaxError: expected ':' (mine.py, line 2)"),
    ],
)
def test_a_file_that_cannot_be_run_says_why(write, text, words):
    path = write(text)
    assert refused(TaskError, f"{path}:Mine") == f"{path} cannot be run{words.format(path=path)}."


def test_an_error_of_many_lines_ends_in_one(write):
    path = write("raise RuntimeError('Error(s) in loading state_dict:\\n  Missing key: a\\n  Missing key: b')")
    assert "\n" not in refused(TaskError, f"{path}:Mine")


def test_a_class_that_needs_arguments_says_what_is_missing(write):
    path = write("class Mine(Task):\n    def __init__(self, width): ...")
    said = refused(TaskError, f"{path}:Mine")
    assert said.startswith(f"{path}:Mine cannot be called: TypeError: ")
    assert said.endswith("missing 1 required positional argument: 'width'.")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mine = 3", "an int"),
        ("mine = 'task'", "a str"),
        ("def mine():\n    return 3.5", "a float"),
        ("class mine: ...", "a mine"),
    ],
    ids=["a number", "a text", "a function that returns a number", "a class of its own"],
)
def test_what_is_no_task_is_refused_with_its_kind(write, text, kind):
    spec = f"{write(text)}:mine"
    assert refused(TaskError, spec).startswith(f"{spec} is {kind}. Try: a brimful.Task")


def test_a_task_without_options_takes_none(write):
    assert refused(BadOption, f"{write(ONE_TASK)}:Mine", model="chatlm-tiny") == "task Mine has no option model=."


OPTIONS = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Options:
    depth: int = 2
    kind: str = "relu"

    def __post_init__(self):
        if self.depth < 1:
            from brimful.errors import BadOption
            raise BadOption(f"depth={self.depth} must be at least 1.")

class Mine(Task):
    Options = Options

instance = Mine()

def make():
    return instance
"""


@pytest.mark.parametrize("name", ["Mine", "instance", "make"])
def test_a_task_in_a_file_has_options_and_defaults(write, name):
    spec = f"{write(OPTIONS)}:{name}"
    assert load_task(spec).options.depth == 2
    task = load_task(spec, {"depth": 3, "kind": None})
    assert (task.options.depth, task.options.kind) == (3, "relu")


def test_options_are_checked_all_at_once_and_by_the_task_itself(write):
    spec = f"{write(OPTIONS)}:Mine"
    message = refused(BadOption, spec, depth="deep", kidn="tanh")
    assert "task Mine has no option kidn=. Try: kind=." in message
    assert "depth='deep' must be a whole number." in message
    assert refused(BadOption, spec, depth=0) == "depth=0 must be at least 1."


def test_a_value_without_a_default_is_required(write):
    text = OPTIONS.replace("depth: int = 2", "depth: int").replace("instance = Mine()", "")
    spec = f"{write(text)}:Mine"
    assert refused(BadOption, spec) == "depth= is required by task Mine."
    assert refused(BadOption, spec, kind="tanh") == "depth= is required by task Mine."


def test_options_that_a_task_inherits_have_their_help():
    assert all(one.help for one in task_option_fields("sft"))
