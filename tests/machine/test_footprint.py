"""What processes really take: anonymous and shared memory, without file pages, over the whole tree."""

import os
import subprocess
import sys

from brimful.machine.host import process_bytes, tree, tree_bytes

MIB = 2**20
CHILD = "x = bytearray(b'1' * 64 * 2**20); print('ready', flush=True); input()"


def test_pages_of_a_mapped_file_do_not_count(tmp_path):
    import mmap

    file = tmp_path / "file"
    file.write_bytes(os.urandom(MIB) * 64)
    before = process_bytes(os.getpid())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        assert process_bytes(os.getpid()) - before < 8 * MIB


def test_children_count_with_their_parent():
    before = tree_bytes()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert child.pid in tree(os.getpid())
        assert process_bytes(child.pid) > 64 * MIB
        assert tree_bytes() - before > 60 * MIB
        child.communicate(b"\n")
    assert child.pid not in tree(os.getpid())


def test_a_process_that_is_gone_takes_nothing(tmp_path):
    assert process_bytes(2**22 + 1) == 0
    assert tree_bytes(1, tmp_path) == 0


def test_without_a_rollup_resident_memory_less_file_pages_counts(tmp_path):
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "status").write_text("VmRSS:\t 900 kB\nRssAnon:\t 300 kB\nRssFile:\t 500 kB\nRssShmem:\t 100 kB\n")
    assert process_bytes(7, tmp_path) == 400 * 1024
    (folder / "smaps_rollup").write_text(
        "0-1 ---p 0 00:00 0 [rollup]\nPss:  900 kB\nPss_Anon:  20 kB\nPss_Shmem:  3 kB\n"
    )
    assert process_bytes(7, tmp_path) == 23 * 1024
