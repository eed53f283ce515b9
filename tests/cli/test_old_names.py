"""Options of other programs: each has an answer, and the answer works.

The tables in the docs come from here: `python -m tests.cli.test_old_names` writes them anew.
"""

import dataclasses
import re
import shlex
from itertools import groupby
from pathlib import Path

import pytest

from brimful.cli.app import main, make_app
from brimful.cli.old_names import OLD_NAMES, SWITCH
from brimful.errors import BadOption
from brimful.languages import set_language, tr

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"Transformers": "from-huggingface.md", "LLaMA-Factory": "from-huggingface.md", "launchers": "from-huggingface.md", "ChatLM": "from-chatlm.md"}  # fmt: skip
SAMPLES = (
    "",
    "true",
    "16",
    "0.03",
    "sft",
    "adamw_torch",
    "cosine",
    "bf16",
    "full",
    "nccl",
    "eval_loss",
    "wandb",
    "rows.jsonl",
    "tiny",
    "4",
    "ipo",
)
BEGIN, END = "<!-- {source}: written by tests/cli/test_old_names.py -->", "<!-- end -->"


def sample(old):
    """A value that has an equivalent."""
    values = SAMPLES if old.switch else SAMPLES[2:]
    return next(value for value in values if old.convert(value) is not None)


def flags(*tokens):
    """What a command accepts."""
    app = make_app(tokens)
    return {
        name for one in app.parse_commands(list(tokens))[1][-1].assemble_argument_collection() for name in one.names
    }


def refused(capsys, *tokens):
    with pytest.raises(SystemExit) as left:
        main([*map(str, tokens)])
    output = capsys.readouterr()
    assert left.value.code == 2 and not output.out
    return re.sub(r"^brimful: error B\d+: ", "", output.err.strip())


def suggestion(message):
    """The corrected command, in words."""
    line = next(line for line in message.splitlines() if "Try: brimful" in line)
    return shlex.split(line.partition("Try: brimful ")[2])


def parse(words):
    make_app(words).parse_args(words, exit_on_error=False, print_error=False)


def command_of(old):
    """A task that has the new option."""
    return ("dpo", "rows") if old.note.startswith("of dpo") else ("sft", "rows")


# ---- The table ----


@pytest.mark.parametrize("name", [name for name, old in OLD_NAMES.items() if old.verdict == "now"])
def test_the_new_option_exists(name):
    flag = OLD_NAMES[name].flag.split()[0]
    assert flag in ("TASK", "DATA") or flag in flags("train", *command_of(OLD_NAMES[name]))


@pytest.mark.parametrize("name", [name for name, old in OLD_NAMES.items() if old.data_flag])
def test_the_new_option_of_the_data_commands_exists(name):
    known = set().union(*(flags("data", command) for command in ("check", "clean", "tokenizer", "tokenize")))
    assert OLD_NAMES[name].data_flag in known


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_is_none_of_ours(name):
    assert f"--{name.replace('_', '-')}" not in flags("train", "sft", "rows")


@pytest.mark.parametrize("name", [name for name, old in OLD_NAMES.items() if old.verdict != "not available"])
def test_the_suggested_command_is_accepted(capsys, name):
    old = OLD_NAMES[name]
    value = sample(old)
    given = [f"--{name}", *([value] if value else [])]
    if old.part == "accumulation":
        given += ["--per_device_train_batch_size", "8"]
    task = command_of(old) if old.note.startswith("of dpo") else ()
    words = suggestion(refused(capsys, "train", *task, *given))
    parse(words)
    new = old.convert(value)
    if old.verdict == "now" and new and not old.part:
        assert (old.flag.split()[0] if new == SWITCH else new) in words


@pytest.mark.parametrize("name", OLD_NAMES)
def test_the_answer_has_the_old_and_the_new_name(capsys, name):
    old = OLD_NAMES[name]
    message = refused(capsys, "train", "sft", "rows", f"--{name}=16")
    assert f"--{name} is " in message and (old.flag or old.verdict).split()[0] in message


def test_every_option_of_the_transformers_trainer_has_an_answer():
    from transformers import Seq2SeqTrainingArguments

    known = flags("train", "sft", "rows")
    names = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
    assert not {name for name in names if name not in OLD_NAMES and f"--{name.replace('_', '-')}" not in known}


# ---- On the command line ----


def test_one_old_name_is_answered_in_one_line(capsys):
    message = refused(capsys, "train", "sft", "rows.jsonl", "--batch_size_per_gpu", "32")
    sentence = "--batch_size_per_gpu is now --micro-batch, a ceiling; usually leave it out."
    assert message == f"{sentence} Try: brimful train sft rows.jsonl"


@pytest.mark.parametrize("written", [["--learning-rate", "5e-5"], ["--learning_rate=5e-5"], ["--learn_rate", "5e-5"]])
def test_hyphens_underscores_and_equals_signs_are_all_read(capsys, written):
    assert suggestion(refused(capsys, "train", "sft", "rows", *written))[-2:] == ["--lr", "5e-5"]


def test_rows_per_step_are_worked_out(capsys):
    message = refused(
        capsys, "train", "sft", "rows", "--per_device_train_batch_size", 32, "--gradient_accumulation_steps", 2
    )
    assert suggestion(message) == ["train", "sft", "rows", "--global-batch", "64"]
    assert "rows per device × accumulation × processes, here 64" in message


def test_processes_count_in_the_rows_per_step(capsys):
    tokens = ["--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 4, "--num_processes", 2]
    words = suggestion(refused(capsys, "train", "sft", "rows", *tokens))
    assert words[3:] == ["--processes", "2", "--global-batch", "64"]


def test_accumulation_alone_gives_no_number(capsys):
    message = refused(capsys, "train", "sft", "rows", "--gradient_accumulation_steps", 4)
    assert "--global-batch" in message and "Try: brimful" not in message


def test_all_old_names_are_in_one_message(capsys):
    message = refused(capsys, "train", "--is_finetune=True", "--use_fast_config=True", "--batch_size_per_gpu=20")
    assert message.startswith("3 options come from other programs.") and message.count(" is now ") == 3
    assert suggestion(message) == ["train", "sft", "DATA", "--recipe", "fast"]


def test_a_command_of_llama_factory_becomes_ours(capsys):
    given = "--stage sft --dataset rows.jsonl --model_name_or_path ./m --finetuning_type full --cutoff_len 256 --fp16 --report_to none"
    words = suggestion(refused(capsys, "train", *given.split()))
    assert words == shlex.split("train sft rows.jsonl --model ./m --freeze none --max-tokens 256 --precision fp16")
    parse(words)


@pytest.mark.parametrize(
    ("given", "sentence", "words"),
    [
        ("--size base", "--size is now --model, chatlm-tiny or chatlm-base.", "--model chatlm-base"),
        ("--from runs/p", "--from is now --model.", "--model runs/p"),
        ("--random-weights", "--random-weights is not needed: a preset of --model, such as chatlm-base, has new weights.", ""),
    ],
)  # fmt: skip
def test_names_of_an_earlier_brimful_are_answered(capsys, given, sentence, words):
    message = refused(capsys, "train", "sft", "rows.jsonl", *given.split())
    assert message == f"{sentence} Try: brimful train sft rows.jsonl{' ' * bool(words)}{words}"


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_old_name_of_a_task_is_answered_together_with_its_options(capsys, command):
    message = refused(capsys, command, "chatlm-sft", "rows", "--size", "tiny", "--random-weights")
    assert message.startswith("3 names have changed.\n  chatlm-sft is now sft.\n")
    assert suggestion(message) == [command, "sft", "rows", "--model", "chatlm-tiny"]
    parse(suggestion(message))


def test_an_old_task_with_options_of_other_programs(capsys):
    message = refused(capsys, "train", "chatlm-pretrain", "rows", "--learning_rate", "1")
    assert message.startswith("2 names have changed or come from other programs.\n")
    assert suggestion(message) == ["train", "pretrain", "rows", "--lr", "1"]


def test_an_old_task_without_old_options_is_answered_by_itself(capsys):
    message = refused(capsys, "train", "chatlm-sft", "rows", "--lr", "1")
    assert message.startswith("the task chatlm-sft is now sft, with the model it trains.")


def test_a_run_that_is_called_like_an_old_task_is_none(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, "train", "sft", "rows", "--run", "chatlm-sft", "--from", "m")
    assert suggestion(message) == ["train", "sft", "rows", "--run", "chatlm-sft", "--model", "m"]


def test_a_recipe_that_is_called_like_a_task_is_none(capsys):
    message = refused(capsys, "train", "rows", "--recipe", "pretrain", "--learn_rate", "1")
    assert suggestion(message) == ["train", "TASK", "rows", "--recipe", "pretrain", "--lr", "1"]


def test_what_has_no_equivalent_is_left_out_of_the_command_and_named(capsys):
    given = [
        "--learning_rate",
        "1",
        "--deepspeed",
        "ds.json",
        "--optim",
        "lion_32bit",
        "--gradient_accumulation_steps",
        "4",
    ]
    message = refused(capsys, "train", "sft", "rows", *given, "--seed", "3")
    assert suggestion(message) == ["train", "sft", "rows", "--seed", "3", "--lr", "1"]
    assert message.endswith("\nThis leaves out --deepspeed, --optim, --gradient_accumulation_steps.")


def test_where_nothing_has_an_equivalent_there_is_no_command(capsys):
    message = refused(capsys, "train", "sft", "rows", "--deepspeed", "ds.json", "--template", "qwen")
    assert "--deepspeed is not available" in message and "Try: brimful" not in message


def test_a_batch_size_keeps_the_rows_of_a_step(capsys):
    message = refused(capsys, "train", "sft", "rows", "--batch_size", "32")
    assert "--global-batch 32 keeps the rows of a step" in message
    assert suggestion(message) == ["train", "sft", "rows", "--global-batch", "32"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["cosine"], ["--schedule", "cosine", "--min-lr", "0"]),
        (["constant"], ["--schedule", "constant"]),
        (["cosine", "--min-lr", "0.2"], ["--min-lr", "0.2", "--schedule", "cosine"]),
    ],
)
def test_a_schedule_ends_where_it_ended_there(capsys, given, words):
    message = refused(capsys, "train", "sft", "rows", "--lr_scheduler_type", *given)
    assert suggestion(message) == ["train", "sft", "rows", *words]


def test_a_schedule_in_a_file_ends_where_it_ended_there(capsys, config):
    message = refused(capsys, "train", "sft", "rows", "--config", config('lr_scheduler_type = "linear"'))
    assert 'schedule = "linear"' in message and "min_lr = 0" in message


def test_the_script_of_an_old_command_is_no_data(capsys):
    """The guides type `accelerate launch ./train_low_mem.py train --is_finetune=True`."""
    message = refused(capsys, "train", "./train_low_mem.py", "train", "--is_finetune=True", "--epochs=5")
    assert message.endswith("Try: brimful train sft DATA --epochs=5")


def test_a_value_without_equivalent_is_named(capsys):
    message = refused(capsys, "train", "sft", "rows", "--optim", "lion_32bit")
    assert "lion_32bit has no equivalent" in message and "Try" not in message


def test_two_values_for_one_option_are_not_chosen_from(capsys):
    assert "Try: brimful" not in refused(capsys, "train", "sft", "rows", "--learning_rate", "1", "--lr", "2")


def test_a_switch_does_not_swallow_the_word_after_it(capsys):
    words = suggestion(refused(capsys, "train", "sft", "--bf16", "rows.jsonl"))
    assert words == ["train", "sft", "rows.jsonl", "--precision", "bf16"]


def test_a_switch_that_is_off_is_left_out(capsys):
    words = suggestion(refused(capsys, "train", "sft", "rows", "--bf16", "False", "--learning_rate", "1"))
    assert words == ["train", "sft", "rows", "--lr", "1"]


def test_words_with_spaces_and_equals_signs_survive(capsys):
    columns = "prompt=a b,response=c"
    message = refused(capsys, "train", "sft", "my rows", "--columns", columns, "--learning_rate", "1")
    assert suggestion(message) == ["train", "sft", "my rows", "--columns", columns, "--lr", "1"]


def test_a_plan_says_what_it_does_not_depend_on(capsys):
    message = refused(capsys, "plan", "sft", "--learning_rate", "1", "--per_device_train_batch_size", "8")
    assert "a plan does not depend on --lr" in message
    assert suggestion(message) == ["plan", "sft", "--global-batch", "8"]


def test_data_commands_answer_too(capsys):
    tokens = ["--tokenizer_dir", "tok", "--max_seq_length", "256", "--output_dir", "store"]
    words = suggestion(refused(capsys, "data", "tokenize", "rows.jsonl", *tokens))
    assert words == shlex.split("data tokenize rows.jsonl --tokenizer tok --max-tokens 256 --output store")
    parse(words)


def test_an_unknown_option_keeps_its_close_match(capsys):
    assert "Did you mean --epochs" in refused(capsys, "train", "sft", "rows", "--epochss", "3")


def test_names_that_are_ours_with_underscores_are_no_old_names():
    parse(["train", "sft", "rows", "--max_steps", "5", "--weight_decay", "0.1"])


MINE = """
from dataclasses import dataclass
from brimful import Task

@dataclass(frozen=True, kw_only=True)
class Options:
    template: str = ""
    '''The user's own.'''

class Mine(Task):
    Options = Options
"""


def test_an_option_of_the_users_own_task_is_theirs(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    message = refused(capsys, "train", f"{tmp_path}/mine.py:Mine", "rows", "--template", "x", "--learning_rate", "1")
    assert "--template is" not in message and suggestion(message)[-2:] == ["--lr", "1"]


def test_an_option_that_the_users_task_does_not_have_is_not_suggested(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    message = refused(capsys, "train", f"{tmp_path}/mine.py:Mine", "rows", "--model_name_or_path", "x")
    assert "has no option --model" in message and "Try: brimful" not in message


# ---- In a file ----


@pytest.fixture
def config(tmp_path):
    def write(text, name="mine.toml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_keys_of_a_file_are_answered_with_the_lines_to_write(capsys, config):
    path = config("learning_rate = 5e-5\nwarmup-ratio = 0.03\nbf16 = true\n[train]\nsave_steps = 100\n")
    message = refused(capsys, "train", "sft", "rows", "--config", path)
    assert f"learning_rate in {path} is now lr, the peak." in message
    lines = message.partition(f"Try: in {path} write\n")[2].split("\n")
    assert [line.strip() for line in lines] == ["lr = 5e-05", 'warmup = "3%"', 'precision = "bf16"', "save_every = 100"]


def test_keys_of_an_earlier_brimful_are_answered_with_the_lines_to_write(capsys, config):
    path = config('size = "base"\nlr = 1e-3\n')
    message = refused(capsys, "train", "sft", "rows", "--config", path)
    assert f"size in {path} is now model, chatlm-tiny or chatlm-base." in message
    assert message.endswith(f'Try: in {path} write\n    model = "chatlm-base"')


def test_rows_per_step_of_a_file_are_worked_out(capsys, config):
    path = config("per_device_train_batch_size = 16\ngradient_accumulation_steps = 4\n")
    assert "global_batch = 64" in refused(capsys, "plan", "sft", "--config", path)


def test_flags_and_keys_are_answered_together(capsys, config):
    message = refused(capsys, "train", "sft", "rows", f"--config={config('bf16 = true')}", "--max_grad_norm", "1")
    assert message.startswith("2 options") and "--clip-norm 1" in message and 'precision = "bf16"' in message


def test_a_yaml_file_of_llama_factory_is_answered(capsys, config):
    path = config("### method\nstage: sft\nlearning_rate: 1.0e-4  # peak\nbf16: true\n", "sft.yaml")
    message = refused(capsys, "train", path)
    assert "learning_rate in" in message and "lr = 1.0e-4" in message and "in a TOML file write" in message


def test_a_file_that_cannot_be_read_is_left_to_its_own_message(capsys, config):
    assert "cannot be read" in refused(capsys, "train", "sft", "rows", "--config", config("lr = "))


def test_a_misspelt_key_keeps_its_close_match(capsys, config):
    message = refused(capsys, "train", "sft", "rows", "--config", config("epoch = 1"))
    assert "unknown option epoch" in message and "epochs" in message


# ---- In the docs ----


def table(source, *head: str) -> str:
    """Names with the same answer share a row."""
    rows = [f"| {' | '.join(head or ('there', 'here'))} | |", "|---|---|---|"]
    mine = [old for old in OLD_NAMES.values() if old.source == source]
    for (verdict, flag, note), group in groupby(mine, key=lambda old: (old.verdict, old.flag, old.note)):
        names = ", ".join(f"`{old.name}`" for old in group)
        here = tr(verdict) if flag is None else flag if flag.startswith("DATA") else f"`{flag}`"
        rows.append(f"| {names} | {here} | {tr(note).replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


@pytest.fixture
def chinese():
    set_language("zh")
    yield
    set_language(None)


def test_the_chinese_page_has_the_same_table(chinese):
    match = section("ChatLM").search((DOCS / "zh" / "from-chatlm.md").read_text(encoding="utf-8"))
    assert match is not None and match[0] == table("ChatLM", "原来", "现在"), "Try: python -m tests.cli.test_old_names"


ENGLISH_NOTES = re.compile(r"[a-z']{3,} [a-z']{2,} [a-z']{2,}")


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_answer_is_chinese_throughout(capsys, chinese, name):
    """What is left are commands and names."""
    with pytest.raises(SystemExit):
        main(["train", "sft", "rows", f"--{name}=16", "--learn_rate", "1e-5"])
    answer = re.sub(r"`[^`]*`|brimful [^，。\n]*|torchrun [^，。]*", "", capsys.readouterr().err)
    assert "其他程序" in answer or "名称" in answer
    assert not ENGLISH_NOTES.search(answer)


def section(source) -> re.Pattern[str]:
    return re.compile(rf"(?<={re.escape(BEGIN.format(source=source))}\n).*?(?=\n{re.escape(END)})", re.DOTALL)


@pytest.mark.parametrize("source", PAGES)
def test_the_docs_have_this_table(source):
    match = section(source).search((DOCS / PAGES[source]).read_text(encoding="utf-8"))
    assert match is not None and match[0] == table(source), "Try: python -m tests.cli.test_old_names"


def test_bad_option_is_what_a_caller_catches():
    from brimful.cli.corrections import refuse_old_names

    tokens = ["train", "sft", "rows", "--learn_rate", "1"]
    with pytest.raises(BadOption, match="--learn_rate is now --lr"):
        refuse_old_names(make_app(tokens), tokens)


if __name__ == "__main__":
    for one, page in PAGES.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        (DOCS / page).write_text(section(one).sub(lambda _, one=one: table(one), text), encoding="utf-8")
    set_language("zh")
    page = DOCS / "zh" / "from-chatlm.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(section("ChatLM").sub(lambda _: table("ChatLM", "原来", "现在"), text), encoding="utf-8")
