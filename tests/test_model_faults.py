# SPDX-License-Identifier: Apache-2.0
"""What happens around a loaded model: its file is cut or overwritten, its process is forked or killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import slimrt
from conftest import GREEDY, PROMPT, TESTS


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copy(tiny, tmp_path / "m.gguf")


@pytest.mark.parametrize("harm", ["cut", "overwritten"])
def test_a_file_that_changed_in_place_is_told(copy, harm):
    with slimrt.Model(copy, n_ctx=64) as model:
        model.generate(PROMPT, max_tokens=1, **GREEDY)
        if harm == "cut":
            os.truncate(copy, 4096)
        else:
            with open(copy, "r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(bytes(8))
            os.utime(copy, ns=(0, 10**18))  # however coarse the clock of the file system
        with pytest.raises(OSError, match=r"m\.gguf' was changed while it was in use: load it again"):
            model.generate(PROMPT, max_tokens=1, **GREEDY)


def test_a_file_that_was_replaced_by_its_name_goes_on(copy, grouped, tmp_path):
    with slimrt.Model(copy, n_ctx=64) as model:
        before = model.generate(PROMPT, max_tokens=4, **GREEDY)
        shutil.copy(grouped, tmp_path / "other").replace(copy)
        assert model.generate(PROMPT, max_tokens=4, **GREEDY).text == before.text


@pytest.mark.unsanitized  # sanitizers take the signal for themselves
def test_a_page_that_is_gone_is_said_in_words(copy):
    """Where no check comes before the read: the process ends as it did, of SIGBUS, but not without a word."""
    script = """if True:
        import os, sys, slimrt._core
        file = slimrt._core.GgufFile(sys.argv[1])
        os.truncate(sys.argv[1], 0)
        file.bytes()[-1]
    """
    done = subprocess.run([sys.executable, "-c", script, copy], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGBUS
    assert f"slimrt: '{copy}' was cut while it was in use" in done.stderr


@pytest.mark.unsanitized  # which tell what such a thread leaves
def test_a_process_ends_beside_a_daemon_thread_at_work():
    """It was aborted: Python unwinds a thread that comes back from a step while it ends."""
    script = """if True:
        import sys, threading, slimrt
        model, begun = slimrt.Model(sys.argv[1], n_ctx=1024), threading.Event()
        def work():
            while True:
                begun.set()
                model.logits([5] * 1000)
        threading.Thread(target=work, daemon=True).start()
        begun.wait()
    """
    path = TESTS.parent / "models" / "tale-llama.gguf"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "terminate" not in done.stderr


def in_child(work, seconds=60) -> int:
    """Exit status of a fork of this process that calls work() and leaves; fails when it does not end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (done := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(done[1])
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


@pytest.mark.unsanitized
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_child_of_a_fork_generates_with_threads_of_its_own_and_closes(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_threads=2) as model:
        before = model.generate(PROMPT, max_tokens=4, **GREEDY).text

        def work():
            assert model.generate(PROMPT, max_tokens=4, **GREEDY).text == before
            model.close()

        assert in_child(work) == 0
        assert in_child(model.close) == 0
        assert model.generate(PROMPT, max_tokens=4, **GREEDY).text == before


@pytest.mark.unsanitized
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_stream_goes_on_in_the_child_of_a_fork(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_threads=2) as model:
        whole = model.generate(PROMPT, max_tokens=9, **GREEDY).text
        stream = model.stream(PROMPT, max_tokens=9, **GREEDY)
        begun = next(stream)

        def work():
            assert begun + "".join(stream) == whole

        assert in_child(work) == 0
        assert begun + "".join(stream) == whole


@pytest.mark.unsanitized
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_text_that_another_thread_was_computing_at_a_fork_is_lost_and_says_so(tiny):
    with slimrt.Model(tiny, n_ctx=64, n_threads=1, n_seqs=2) as model:
        stream = model.stream(PROMPT, max_tokens=9, **GREEDY)
        next(stream)
        inside, go_on = threading.Event(), threading.Event()

        def pause(ids, logits):
            inside.set()
            go_on.wait(30)
            return logits

        call = {"max_tokens": 1, "logits_processor": pause, **GREEDY}
        thread = threading.Thread(target=lambda: model.generate(PROMPT, **call), daemon=True)
        thread.start()

        def work():
            with pytest.raises(RuntimeError, match="when the process was forked"):
                next(stream)

        try:
            assert inside.wait(30) and in_child(work) == 0
        finally:
            go_on.set()
            thread.join(30)
        assert "".join(stream)


@pytest.mark.unsanitized
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_while_another_thread_generates(tiny):
    """The child never hangs: it says that the model is lost, or goes on where nobody was inside at that moment."""
    with slimrt.Model(tiny, n_ctx=2048, n_threads=2) as model:
        inside, stop = threading.Event(), threading.Event()

        def progress(*_):
            inside.set()
            if stop.is_set():
                raise RuntimeError("stopped")

        def generate():
            while not stop.is_set():
                with contextlib.suppress(RuntimeError):
                    model.generate([1] * 2000, max_tokens=1, on_progress=progress, **GREEDY)

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()

        def work():
            try:
                model.tokenize(PROMPT)
                model.generate(PROMPT, max_tokens=2, **GREEDY)
            except RuntimeError as error:
                assert "load it again" in str(error)
            model.close()

        try:
            inside.wait(30)
            assert [in_child(work) for _ in range(5)] == [0] * 5
        finally:
            stop.set()
            thread.join(30)


def test_what_a_killed_conversion_left_is_removed_by_the_next(tiny, tmp_path):
    """And nothing that belongs to a conversion that still runs, or to another target."""
    out = tmp_path / "out.gguf"
    script = """if True:
        import os, signal, sys
        from slimrt.plumbing.files import stand_in, written_beside
        from pathlib import Path
        out = Path(sys.argv[1])
        with stand_in(out, "", Path.mkdir) as folder, written_beside(out) as partial:
            (folder / "tensor").write_bytes(b"x")
            partial.write_bytes(b"half")
            print("ready", flush=True)
            sys.stdin.read()
    """
    killed, running = (
        subprocess.Popen([sys.executable, "-c", script, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    )
    for process in (killed, running):
        assert process.stdout.readline() == b"ready\n"
    other = tmp_path / ".other.gguf.01234567.partial"
    other.touch()
    assert len(list(tmp_path.iterdir())) == 5
    killed.kill()
    killed.wait()
    slimrt.convert(tiny, out, progress=False)
    left = set(tmp_path.iterdir()) - {out, other}
    assert len(left) == 2 and out.is_file() and other.exists()
    running.communicate()
    assert set(tmp_path.iterdir()) == {out, other} and out.read_bytes() == b"half"
