"""`brimful report RUN…`: what a run did, as a page, as Markdown or as JSON, or live in a browser."""

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from brimful.cli.flags import Switch
from brimful.cli.output import with_flags
from brimful.errors import BadOption, BadRun
from brimful.files import write_atomic
from brimful.languages import tr

if TYPE_CHECKING:
    from brimful.report.run_record import RunRecord

PAGE, COMPARED = "report.html", "report-compared.html"


def report(
    *runs: Path,
    output: Path | None = None,
    format: Literal["html", "md", "json"] = "html",
    serve: Switch = False,
    port: int | None = None,
) -> None:
    """Show what a run did: a summary in plain words, the plan and its reasons, memory, loss, speed and what happened.

    The page needs no network, and can be sent, archived and printed. Several runs are drawn over each other.

    Parameters
    ----------
    runs
        Folders that `brimful train` wrote. Default: the newest in runs/.
    output
        The file to write. Default: RUN/report.html; Markdown and JSON are printed.
    format
        html: a page; md: a summary for a notebook; json: every figure.
    serve
        Show the page in a browser of this machine and keep it up to date until Ctrl-C.
    port
        The port of --serve. Default: a free one.
    """
    from brimful.report.run_record import RunRecord, newest_run_folder

    if port is not None and not serve:
        raise BadOption("port= needs serve=True. Try: --serve.")
    if serve and (output is not None or format != "html"):
        raise BadOption("--serve shows a page and writes nothing. Try: without --output and --format.")
    folders = list({path.resolve(): path for path in runs or (newest_run_folder(),)}.values())
    records = [RunRecord(folder) for folder in folders]
    if serve:
        _serve(records, port or 0)
        return
    from brimful.report.page.report import Report

    page = Report(records, wording=with_flags)
    text = {"html": page.html, "md": page.markdown, "json": lambda: page.json() + "\n"}[format]()
    if output is None and format != "html":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = output or folders[0] / (PAGE if len(folders) == 1 else COMPARED)
    try:
        write_atomic(path, text)
    except OSError as error:
        raise BadRun(f"{path} cannot be written ({error.strerror}). Try: another file with output=.") from None
    print(tr("Saved to {path}", path=path), flush=True)


def _serve(records: "list[RunRecord]", port: int) -> None:
    from brimful.report.page.live import LivePage, LiveServer

    with LiveServer(LivePage(records, wording=with_flags), port=port) as server:
        print(server.url, flush=True)
        print(tr("Open this address in a browser. Ctrl-C ends it."), file=sys.stderr, flush=True)
        if os.environ.get("SSH_CONNECTION"):
            command = f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} {socket.gethostname()}"
            print(tr("From another machine, first: {command}", command=command), file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(tr("stopped"), file=sys.stderr, flush=True)
