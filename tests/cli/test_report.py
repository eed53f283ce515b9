"""`brimful report` as a user types it."""

import http.client
import json
import os
import signal
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from brimful.cli.app import main
from tests.report.page.rich_runs import rich_run


def run(*words) -> None:
    main(["report", *map(str, words)])


def refused(capsys, *words) -> str:
    with pytest.raises(SystemExit) as exit_:
        run(*words)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "Traceback" not in message
    return message


def test_the_page_is_written_into_the_run(tmp_path, capsys):
    folder = rich_run(tmp_path / "a", steps=20)
    run(folder)
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out == f"Saved to {folder / 'report.html'}\n"


def test_without_a_name_it_is_the_newest_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rich_run(tmp_path / "runs" / "old", steps=3)
    rich_run(tmp_path / "runs" / "new", steps=3)
    os.utime(tmp_path / "runs" / "old" / "events.jsonl", (1, 1))
    run()
    assert (tmp_path / "runs" / "new" / "report.html").is_file()


def test_several_runs_do_not_replace_the_page_of_one(tmp_path, capsys):
    one, other = rich_run(tmp_path / "a", steps=20), rich_run(tmp_path / "b", steps=20)
    run(one, other)
    assert (one / "report-compared.html").is_file() and not (one / "report.html").exists()


def test_a_run_named_twice_is_one_run(tmp_path, capsys):
    folder = rich_run(tmp_path / "a", steps=20)
    run(folder, folder / ".." / "a")
    assert (folder / "report.html").is_file()


def test_the_page_goes_where_it_is_wanted(tmp_path, capsys):
    folder = rich_run(tmp_path / "a", steps=20)
    run(folder, "--output", tmp_path / "my page.html")
    assert (tmp_path / "my page.html").is_file() and not (folder / "report.html").exists()


def test_nothing_is_left_of_a_page_that_cannot_be_written(tmp_path, capsys):
    folder = rich_run(tmp_path / "a", steps=3)
    message = refused(capsys, folder, "--output", tmp_path / "nowhere" / "page.html")
    assert "cannot be written (No such file or directory). Try: another file with --output." in message


def test_markdown_is_printed(tmp_path, capsys):
    run(rich_run(tmp_path / "a", steps=20), "--format", "md")
    assert capsys.readouterr().out.startswith("# a\n\nsft was trained on ")


def test_json_is_one_object_and_nothing_else(tmp_path, capsys):
    run(rich_run(tmp_path / "a", steps=20), "--format", "json")
    assert json.loads(capsys.readouterr().out)["runs"][0]["steps"] == 20


def test_markdown_may_go_to_a_file(tmp_path, capsys):
    run(rich_run(tmp_path / "a", steps=20), "--format", "md", "--output", tmp_path / "a.md")
    assert (tmp_path / "a.md").read_text().startswith("# a\n")


def test_paths_may_have_spaces_and_chinese(tmp_path, capsys):
    folder = rich_run(tmp_path / "我的 run", steps=20)
    run(folder)
    assert "我的 run" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert "so it is not a run" in refused(capsys, tmp_path)
    assert "there is no run at" in refused(capsys, tmp_path / "nope")


def test_a_run_of_a_newer_version_is_refused(tmp_path, capsys):
    (tmp_path / "events.jsonl").write_text(
        '{"event": "begin", "time": "2026-01-31T09:00:00Z", "step": 0, "format": 99}\n'
    )
    assert "was written by a newer Brimful" in refused(capsys, tmp_path)


def test_a_port_needs_a_server(tmp_path, capsys):
    assert "--port needs --serve" in refused(capsys, rich_run(tmp_path / "a", steps=3), "--port", 80)


def test_a_server_writes_no_file(tmp_path, capsys):
    assert "Try: without --output and --format." in refused(capsys, tmp_path, "--serve", "--format", "json")


def test_the_command_needs_no_torch(tmp_path):
    folder = rich_run(tmp_path / "a", steps=20)
    code = f"import sys; from brimful.cli.app import main; main(['report', {str(folder)!r}]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_live_page_is_served_until_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "brimful", "report", "--serve", str(rich_run(tmp_path / "a", steps=20))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request("GET", url.path)
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in errors and errors.endswith("stopped\n")
    finally:
        process.kill()
        process.wait(60)
