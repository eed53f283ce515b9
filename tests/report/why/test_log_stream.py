"""Logs of any size and in any state are read: in pieces, in bounded memory, and without a traceback."""

import gzip
import io
import tracemalloc

import pytest

import brimful
from brimful.errors import BadData
from brimful.report.why import log_reader
from brimful.report.why.log_reader import diagnose_stream

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.64 GiB of which "
    "1.06 GiB is free. Including non-PyTorch memory, this process has 22.57 GiB memory in use. Of the allocated memory 21.40 GiB is "
    "allocated by PyTorch, and 601.00 MiB is reserved by PyTorch but unallocated.\n"
)
LINE = "{'loss': 2.4032, 'grad_norm': 0.91, 'learning_rate': 1.8e-05, 'epoch': 0.4}\n"


def complete(diagnosis):
    return diagnosis.kind == "gpu-out-of-memory" and diagnosis.figures["unallocated_bytes"] == 601 * 2**20


class Endless(io.RawIOBase):
    """A log of many megabytes that is nowhere as a whole."""

    def __init__(self, pieces, last):
        self.pieces, self.last = pieces, last
        self.piece = (LINE * (log_reader.PIECE_BYTES // len(LINE) + 1)).encode()[: log_reader.PIECE_BYTES - 7]

    def read(self, size=-1):
        if self.pieces == 0:
            last, self.last = self.last, b""
            return last
        self.pieces -= 1
        return self.piece


def test_memory_is_bounded():
    tracemalloc.start()
    try:
        diagnosis = diagnose_stream(Endless(48, ("\n" + MESSAGE).encode()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert complete(diagnosis) and peak < 16 * 2**20


def test_a_line_that_repeats_without_end_is_bounded_too():
    log = "loss: nan\n" * 200_000 + MESSAGE
    diagnosis = brimful.diagnose(log)
    assert complete(diagnosis) and diagnosis.others[0].kind == "nan-loss"


@pytest.mark.parametrize("piece", [97, 1000, 4096, 16_385])
def test_a_message_across_pieces_is_found_once_and_complete(monkeypatch, piece):
    monkeypatch.setattr(log_reader, "PIECE_BYTES", piece)
    for shift in range(0, piece, max(1, piece // 13)):
        diagnosis = brimful.diagnose("x" * shift + "\n" + LINE * 300 + "[rank1]: " + MESSAGE + LINE * 2)
        assert complete(diagnosis)
        assert diagnosis.figures["rank"] == 1 and "ranks" not in diagnosis.figures
        assert diagnosis.evidence.startswith("line 302: ")


def test_progress_bars_end_lines_with_a_carriage_return():
    bars = "".join(f"\r {step}%|████      | {step}/100 [00:10<00:10,  9.9it/s]" for step in range(100))
    diagnosis = brimful.diagnose(bars + "\r" + MESSAGE)
    assert complete(diagnosis) and diagnosis.evidence.startswith("line 1: torch.OutOfMemoryError")


def test_windows_ends_lines_with_both():
    assert complete(brimful.diagnose((LINE + MESSAGE).replace("\n", "\r\n")))


def test_colours_are_left_out():
    coloured = MESSAGE.replace("out of", "\x1b[1;31mout of\x1b[0m").replace("1.50", "\x1b[38;5;208m1.50\x1b[0m")
    assert complete(brimful.diagnose(coloured))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_powershell_writes_utf_16(encoding):
    assert complete(brimful.diagnose((LINE * 40 + MESSAGE).encode(encoding)))


def test_nul_bytes_of_a_truncated_file_do_not_matter():
    assert complete(brimful.diagnose(b"\0" * 100_000 + MESSAGE.encode() + b"\0" * 100))


def test_a_gzipped_log_is_read(tmp_path):
    (tmp_path / "train.log.gz").write_bytes(gzip.compress((LINE * 1000 + MESSAGE).encode()))
    assert complete(brimful.diagnose(tmp_path / "train.log.gz"))


def test_a_truncated_gzip_is_one_sentence(tmp_path):
    content = gzip.compress((LINE * 1000 + MESSAGE).encode())
    (tmp_path / "train.log.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(BadData, match="cannot be read"):
        brimful.diagnose(tmp_path / "train.log.gz")


def test_a_launcher_may_prefix_every_line_of_a_message():
    wrapped = MESSAGE.replace(". ", ".\n[rank3]: ")
    assert complete(brimful.diagnose("[rank3]: " + wrapped))


def test_a_terminal_may_have_broken_the_message_anywhere():
    words = MESSAGE.split()
    for at in range(2, 20):
        assert complete(brimful.diagnose(" ".join(words[:at]) + "\n" + " ".join(words[at:]))), words[at]


@pytest.mark.parametrize(
    ("content", "kind", "cause"),
    [
        (b"", "empty", "The log is empty."),
        (b"\n", "unknown", "Nothing was recognised in 1 line."),
        (b"PK\x03\x04" + bytes(range(256)) * 40, "unknown", "This is a zip file or a torch checkpoint, not a log"),
        (bytes(range(1, 256)) * 400, "unknown", "This is a binary file, not a log"),
        (b"\xff\xfe", "empty", "The log is empty."),
        (b"\x1b[", "unknown", "Nothing was recognised"),
    ],
)
def test_what_is_no_log_is_one_sentence(tmp_path, content, kind, cause):
    (tmp_path / "log").write_bytes(content)
    diagnosis = brimful.diagnose(tmp_path / "log")
    assert diagnosis.kind == kind and cause in diagnosis.cause


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(BadData, match="^.*nowhere.log cannot be read \\(No such file or directory\\). Try: "):
        brimful.diagnose(tmp_path / "nowhere.log")


def test_a_folder_is_no_log(tmp_path):
    with pytest.raises(BadData, match="cannot be read"):
        brimful.diagnose(tmp_path)


def test_a_path_with_spaces_and_chinese(tmp_path):
    path = tmp_path / "训练 日志.log"
    path.write_text(MESSAGE, encoding="utf-8")
    assert complete(brimful.diagnose(path))


def test_chinese_systems_write_gb18030():
    diagnosis = brimful.diagnose("正在加载数据……\n训练开始\n已杀死\n".encode("gb18030"))
    assert diagnosis.kind == "host-killed" and diagnosis.evidence == "line 3: 已杀死"


def test_a_log_may_have_lines_in_two_encodings():
    log = "训练 45%|████▌     | 9/20\n".encode() + "./train.sh：第 12 行：23456 已杀死\n".encode("gb18030")
    diagnosis = brimful.diagnose(log)
    assert diagnosis.kind == "host-killed" and "第 12 行" in diagnosis.evidence


@pytest.mark.parametrize("piece", [7, 64, 1000])
def test_utf_8_that_a_piece_ends_within_is_not_taken_for_gb18030(monkeypatch, piece):
    monkeypatch.setattr(log_reader, "PIECE_BYTES", piece)
    diagnosis = brimful.diagnose("训练已经开始，共三轮\n" * 40 + "./train.sh：第 12 行：23456 已杀死\n")
    assert diagnosis.evidence.endswith("./train.sh：第 12 行：23456 已杀死")


def test_text_in_another_encoding_is_read_as_far_as_it_goes():
    assert complete(brimful.diagnose("训练失败\n".encode("gb18030") + MESSAGE.encode()))
