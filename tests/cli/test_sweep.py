"""`brimful sweep` as a user types it: a small grid from molecules to tables, killed and resumed, and every mistake."""

import contextlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("rdkit")

from brimful.cli.app import main
from brimful.molecules.methods import TRIVIAL_BASELINES
from brimful.molecules.spec import show_grid
from brimful.molecules.spec_file import read_spec
from brimful.molecules.terminal import SweepProgress
from brimful.training.events import read_events

ROOT = Path(__file__).parents[2]
CHAINS = ["C" * length for length in range(1, 9)]
RARE = ["c1cc({})oc1", "c1cc({})sc1", "c1ncc({})cn1", "C1CCC({})C1", "C1CCC({})CN1", "c1ccc2cc({})ccc2c1", "C1CC({})C1",
        "c1ccc2oc({})cc2c1", "c1ccc2sc({})cc2c1", "C1COC({})CN1", "C1CC2CCC1C2{}", "c1nc({})cs1"]  # fmt: skip
"""Ring systems of four molecules each; benzene has forty-eight."""
DATASETS = """
[[datasets]]
file = "few.csv"
split = ["scaffold", "random"]
label = "acid"
"""
TRAIN = """
[head]
hidden = [8]
[train]
lr = 1e-2
batch = 8
epochs = 12
"""
SPEC = f'seeds = 2\nmethods = ["dpo", "msp", "knn"]\nencoders = [{{name = "ecfp", bits = 64}}]\n{DATASETS}{TRAIN}'
HEADS = 2 * 2 * 2
"""Seeds × splits × methods that train."""


def molecules():
    """SMILES, and whether it is an acid."""
    benzenes = [f"c1ccc({chain}{end})cc1{other}" for chain in CHAINS for end in ("", "C(=O)O") for other in "CFO"]
    return [*benzenes, *(ring.format(f"{chain}{end}") for ring in RARE for chain in CHAINS[1:3] for end in ("", "C(=O)O"))]  # fmt: skip


def write(folder, spec=SPEC, name="few.toml"):
    """A spec beside its molecules."""
    rows = [f"{smiles},{int('C(=O)O' in smiles)},1" for smiles in molecules()]
    (folder / "few.csv").write_text("\n".join(["smiles,acid,one", *rows, "C1CC,0,1"]) + "\n")
    (folder / name).write_text(spec)
    return folder / name


def swept(spec, folder, *words):
    """The JSON object of a sweep in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        main(["sweep", str(spec), "--output", str(folder), "--cache", str(Path(spec).parent / "cache"), "--device", "cpu", "--json", *words])  # fmt: skip
    return json.loads(output.getvalue())


def same_figures(rows, others):
    """Packed differently, a head may differ in the last bits of its weights, and so in a pair of molecules or two."""
    keys = ("dataset", "encoder", "method", "settings", "seed", "run")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in others]
    assert [row["auroc"] for row in rows] == pytest.approx([row["auroc"] for row in others], abs=0.01)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def undisturbed(spec):
    """A whole sweep of the smallest grid, its folder and its JSON."""
    folder = spec.parent / "undisturbed"
    return folder, swept(spec, folder)


def test_the_json_object_describes_the_sweep(undisturbed):
    folder, result = undisturbed
    keys = ["output", "finished", "rows", "summary", "remarks", "packs", "seconds", "trained", "ooms", "peak_bytes"]
    assert list(result)[: len(keys)] == keys
    assert result["output"] == str(folder) and result["finished"] and result["trained"] == HEADS and result["ooms"] == 0
    assert {(row["dataset"], row["method"], row["seed"]) for row in result["rows"]} == {
        (dataset, method, seed)
        for dataset in ("few-scaffold", "few-random")
        for method in ("dpo", "msp", "knn", *TRIVIAL_BASELINES)
        for seed in (0, 1)
    }
    assert all(0 <= row["auroc"] <= 1 for row in result["rows"])


def test_heads_learn_from_a_scaffold_split_and_nothing_from_a_random_one(undisturbed):
    found = {(one["dataset"], one["method"]): one["auroc"] for one in undisturbed[1]["summary"]}
    assert found["few-scaffold", "dpo"] > 0.9
    assert 0.2 < found["few-random", "dpo"] < 0.8


def test_the_parquet_has_the_rows_of_the_json_object(undisturbed):
    folder, result = undisturbed
    assert pq.read_table(folder / "results.parquet").to_pylist() == result["rows"]


def test_trivial_baselines_are_in_every_table(undisturbed, spec, capsys):
    folder, _ = undisturbed
    main(["sweep", str(spec), "--output", str(folder), "--cache", str(spec.parent / "cache"), "--device", "cpu"])
    views = [capsys.readouterr().out] + [(folder / name).read_text() for name in ("results.md", "results.tex", "report.html")]  # fmt: skip
    for view in views:
        tables = view.split("scaffold split")[1].split("random split")
        assert all(name in table for table in tables[:2] for name in TRIVIAL_BASELINES), view[:300]


def test_unreadable_molecules_are_listed_with_their_row(undisturbed):
    lines = (undisturbed[0] / "left_out.csv").read_text().splitlines()
    assert lines[0] == "dataset,row,smiles,reason" and "few-scaffold,96,C1CC,unclosed ring" in lines


def test_a_finished_sweep_trains_nothing_again(undisturbed, spec):
    folder, result = undisturbed
    again = swept(spec, folder)
    assert again["trained"] == 0 and again["rows"] == result["rows"] and again["remarks"] == result["remarks"]


def test_a_grown_spec_trains_what_is_new(spec, undisturbed):
    folder, result = undisturbed
    grown = write(spec.parent, SPEC.replace("seeds = 2", "seeds = 3"), "grown.toml")
    more = swept(grown, shutil.copytree(folder, spec.parent / "growing"))
    assert more["trained"] == HEADS // 2
    assert [row for row in more["rows"] if row["seed"] < 2] == result["rows"]


def test_a_grown_grid_trains_what_is_new_and_names_the_settings_of_all(spec, undisturbed):
    folder, result = undisturbed
    text = SPEC.replace("lr = 1e-2", "lr = [1e-2, 1e-3]").replace('"knn"', '{name = "knn", k = [5, 10]}')
    folder = shutil.copytree(folder, spec.parent / "wider")
    more = swept(write(spec.parent, text, "wider.toml"), folder)
    assert more["trained"] == HEADS
    assert {row["settings"] for row in more["rows"]} == {"lr=0.01", "lr=0.001", "k=5", "k=10", ""}
    before = [row for row in more["rows"] if row["settings"] in ("lr=0.01", "k=5", "")]
    assert [{**row, "settings": ""} for row in before] == result["rows"]
    assert all((folder / "runs" / f"{row['run']}.npz").exists() for row in more["rows"])


def test_a_label_can_be_added_and_not_changed(tmp_path, capsys):
    text = SPEC.replace("seeds = 2", "seeds = 1").replace('"msp", "knn"', '"knn", "mahalanobis"')
    first = swept(write(tmp_path, text.replace("label", "# label")), tmp_path / "out")
    more = swept(write(tmp_path, text.replace('"knn"', '"knn", "msp"')), tmp_path / "out")
    assert (first["trained"], more["trained"]) == (2, 2)
    runs, before = ({(row["dataset"], row["method"]): row["run"] for row in result["rows"]} for result in (more, first))
    new = {method for dataset, method in runs if runs[dataset, method] != before.get((dataset, method))}
    assert new == {"msp", "mahalanobis"}  # which has classes now
    rows = (tmp_path / "few.csv").read_text()
    (tmp_path / "few.csv").write_text(rows.replace(",1,1\n", ",2,1\n").replace(",0,1\n", ",1,1\n", 3))
    assert "the label of few-scaffold (acid) changed" in refused(capsys, tmp_path / "few.toml")


def test_runs_that_diverged_get_a_remark_in_every_call(tmp_path):
    text = f'seeds = 1\nmethods = ["dpo"]\nencoders = ["ecfp"]\n{DATASETS}{TRAIN}'.replace(', "random"', "")
    first = swept(write(tmp_path, text.replace("1e-2", "1e30")), tmp_path / "out")
    result = first["remarks"]["few-scaffold"]
    assert result[-1] == "dpo on ecfp, seed 0: the loss was not finite in epoch 1"
    more = swept(write(tmp_path, text.replace("1e-2", "[1e30, 1e-2]")), tmp_path / "out")
    assert more["trained"] == 1
    assert more["remarks"]["few-scaffold"] == [*result[:-1], result[-1].replace("dpo on", "dpo lr=1e+30 on")]


def test_the_positive_side_can_be_changed_afterwards(spec, undisturbed):
    folder, result = undisturbed
    other = write(spec.parent, f'positive = "id"\n{SPEC}', "other.toml")
    again = swept(other, shutil.copytree(folder, spec.parent / "other"))
    assert again["trained"] == 0
    for row, before in zip(again["rows"], result["rows"], strict=True):
        assert (row["positive"], row["aupr"], row["fpr95"]) == ("id", before["aupr_id"], before["fpr95_id"])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.torture)])
def test_two_processes_give_the_rows_of_one(spec, undisturbed, monkeypatch, method):
    """Spawned as users have it in the torture set, where importing torch twice may take its time."""
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    result = swept(spec, spec.parent / method, "--processes", "2")
    assert {pack["share"] for pack in result["packs"]} == {0, 1}
    same_figures(result["rows"], undisturbed[1]["rows"])


def test_a_killed_sweep_resumes(spec, undisturbed):
    folder = spec.parent / "killed"
    finished = kill_after_the_first_head(spec, folder)
    assert 0 < len(finished) < HEADS
    result = swept(spec, folder)
    assert result["trained"] == HEADS - len(finished)
    same_figures(result["rows"], undisturbed[1]["rows"])
    cells = [event["cell"] for event in read_events(folder / "events.jsonl") if event["event"] == "run"]
    assert len(cells) == len(set(cells)) == len(result["rows"])


def kill_after_the_first_head(spec, folder):
    """The heads that were finished when it was killed, by name."""
    words = ["sweep", spec, "--output", folder, "--cache", spec.parent / "cache", "--device", "cpu", "--pack", 1]
    process = multiprocessing.get_context("fork").Process(target=main, args=(list(map(str, words)),))
    process.start()
    until = time.monotonic() + 100
    while time.monotonic() < until and process.is_alive() and not trained(folder):
        time.sleep(0.002)
    process.kill()
    process.join()
    return trained(folder)


def trained(folder):
    events = read_events(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
    return {event["run"] for event in events if event["event"] == "run" and event.get("epochs")}


def test_ctrl_c_keeps_the_state_of_the_heads(spec, undisturbed, monkeypatch):
    folder = spec.parent / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(SweepProgress, "__call__", press_ctrl_c)
        stopped = swept(spec, folder)
    assert not stopped["finished"] and stopped["trained"] < HEADS and (folder / "state" / "0.safetensors").exists()
    result = swept(spec, folder)
    (resumed,) = [event for event in read_events(folder / "events.jsonl") if event["event"] == "resume"]
    assert 0 < resumed["heads"] <= HEADS
    assert result["finished"] and not (folder / "state").exists()
    same_figures(result["rows"], undisturbed[1]["rows"])


def press_ctrl_c(progress, event):
    """Once, after the first epoch: a second one would not wait for anything to be saved."""
    if event["event"] == "epochs" and not hasattr(progress, "pressed"):
        progress.pressed = True
        os.kill(os.getpid(), signal.SIGINT)


def test_results_of_other_data_are_not_mixed(tmp_path, spec, undisturbed, capsys):
    other = write(tmp_path)
    (tmp_path / "few.csv").write_text((tmp_path / "few.csv").read_text().replace("c1cc(CC)oc1", "c1cc(CCO)oc1"))
    assert "holds results of other data" in refused(capsys, other, "--output", undisturbed[0])


def test_another_split_is_refused_though_the_encoder_is_new(tmp_path, undisturbed, capsys):
    folder = shutil.copytree(undisturbed[0], tmp_path / "out")
    other = write(tmp_path, SPEC.replace("bits = 64", "bits = 32").replace("label", "split_seed = 1\nlabel"))
    assert "the molecules, the split or the features of few-scaffold changed" in refused(capsys, other)
    assert folder.exists()


def refused(capsys, spec, *words) -> str:
    """The message of a mistake."""
    words = words or ("--output", spec.parent / "out")
    with pytest.raises(SystemExit) as left:
        main(["sweep", *map(str, (spec, *words, "--device", "cpu", "--cache", spec.parent / "cache"))])
    streams = capsys.readouterr()
    assert left.value.code == 2 and not streams.out
    (line,) = [line for line in streams.err.splitlines() if not line.startswith("sweep: ")]
    return line


HEAD = 'seeds = 1\nmethods = ["dpo"]\nencoders = ["ecfp"]\n'
MISTAKES = {
    "an empty file": (HEAD + DATASETS.replace("few.csv", "empty.csv"), "empty.csv has a header but no rows"),
    "no readable molecule": (HEAD + DATASETS.replace("few.csv", "broken.csv"), "has no molecule that RDKit can read"),
    "one class": (HEAD.replace("dpo", "msp") + DATASETS.replace('"acid"', '"one"'), "a classifier needs two classes"),
    "no label": (HEAD.replace("dpo", "msp") + DATASETS.replace("label", "# label"), "msp trains a classifier"),
    "NaN features": (HEAD.replace("ecfp", "nan.npy") + DATASETS + TRAIN, "NaN or infinite"),
    "features of other rows": (HEAD.replace("ecfp", "short.npy") + DATASETS + TRAIN, "has 3 rows of features"),
    "a large batch": (HEAD + DATASETS, "batch 512 is larger than the 2"),
    "an unknown method": (HEAD.replace("dpo", "dop") + DATASETS, "did you mean dpo?"),
    "an unknown encoder": (HEAD.replace("ecfp", "ecpf") + DATASETS, "did you mean ecfp?"),
    "an unknown key": (HEAD + DATASETS + "[train]\nbatches = 8\n", "did you mean batch?"),
    "an unknown split": (HEAD + DATASETS.replace("scaffold", "scafold"), "did you mean scaffold?"),
    "an unknown file": (HEAD + DATASETS.replace("few.csv", "fwe.csv"), "did you mean few.csv or"),
    "an unknown label": (HEAD.replace("dpo", "msp") + DATASETS.replace("acid", "acids"), "Try: 'acid'"),
    "an encoder without its Python": (HEAD.replace("ecfp", "minimol") + DATASETS + TRAIN, "see docs/encoders.md"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("BRIMFUL_MINIMOL_PYTHON", raising=False)
    content, sentence = MISTAKES[mistake]
    spec = write(tmp_path, content)
    (tmp_path / "empty.csv").write_text("smiles,acid\n")
    (tmp_path / "broken.csv").write_text("smiles,acid\nC1CC,0\n((,1\n")
    np.save(tmp_path / "nan.npy", np.full((len(molecules()) + 1, 3), np.nan))
    np.save(tmp_path / "short.npy", np.zeros((3, 3)))
    assert sentence in refused(capsys, spec)
    assert not (tmp_path / "out").exists()


def test_all_mistakes_of_a_spec_are_reported_together(tmp_path, capsys):
    content = HEAD.replace("dpo", "dop").replace("seeds", "seed") + DATASETS + "[train]\nlr = -1\n"
    line = refused(capsys, write(tmp_path, content))
    assert all(
        part in line for part in ("did you mean seeds?", "did you mean dpo?", "lr must be a number above 0, not -1")
    )


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    from brimful.training.run import RunLock

    with RunLock(tmp_path / "out"):
        assert "in use by another process" in refused(capsys, write(tmp_path))


@pytest.mark.parametrize(
    ("example", "files", "runs"),
    [
        ("small.toml", [], "3 datasets × 2 encoders × 7 methods in 8 settings × 3 seeds = 144 runs"),
        ("tox21.toml", ["tox21.csv.gz"], "2 datasets × 1 encoder × 3 methods × 3 seeds = 18 runs"),
        ("guide004.toml", [f"lbap_core_ic50_{one}.json" for one in ("assay", "scaffold", "size")], "3 datasets × 2 encoders × 11 methods × 10 seeds = 660 runs"),
    ],
)  # fmt: skip
def test_an_example_is_a_spec(example, files, runs, tmp_path):
    for name in ("molecules.csv", example):
        (tmp_path / name).write_bytes((ROOT / "examples" / "sweep" / name).read_bytes())
    for name in files:
        (tmp_path / name).touch()
    assert show_grid(read_spec(tmp_path / example)) == runs


def test_every_spec_of_the_docs_can_be_read(tmp_path):
    guide = (ROOT / "docs" / "molecules.md").read_text()
    blocks = [block for block in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL) if "[[datasets]]" in block]
    for number, block in enumerate(blocks):
        for name in re.findall(r'"([\w./]+\.(?:csv|csv\.gz|json|npy))"', block):
            (tmp_path / name).touch()
        (tmp_path / f"{number}.toml").write_text(block)
        read_spec(tmp_path / f"{number}.toml")
    assert blocks
