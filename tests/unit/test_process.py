"""No process outlives whoever started it, however that ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from eagle3_lib.engines import base
from eagle3_lib.errors import Eagle3Error

# A server as engines are: the first process starts a second one, and neither ends when the other is killed.
SERVER = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)  # TAG']); time.sleep(60)  # TAG"


def tagged(tag):
    found = []
    for process in psutil.process_iter():
        try:
            if tag in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_with_the_process_that_holds_it(signum):
    tag = f"eagle3-test-{os.getpid()}-{signum}"
    code = textwrap.dedent(f"""
        import subprocess, sys, time
        server = {SERVER.replace("TAG", tag)!r}
        subprocess.Popen([sys.executable, "-m", "eagle3_lib.process", "--group", sys.executable, "-c", server], start_new_session=True)
        time.sleep(60)  # {tag}
    """)
    holder = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    assert wait_until(lambda: len(tagged(tag)) >= 4)  # holder, supervisor, server, its child
    holder.send_signal(signum)
    holder.wait(10)
    assert wait_until(lambda: not tagged(tag)), tagged(tag)


def test_when_the_first_process_of_a_server_is_killed_its_children_go_too():
    tag = f"eagle3-test-{os.getpid()}-alone"
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "eagle3_lib.process", "--group", sys.executable, "-c", SERVER.replace("TAG", tag)],
        start_new_session=True,
    )
    assert wait_until(lambda: len(tagged(tag)) >= 3)
    first = next(p for p in tagged(tag) if p.ppid() == supervisor.pid)
    first.kill()
    assert supervisor.wait(10) == 128 + signal.SIGKILL
    assert not tagged(tag)


def test_a_command_tied_to_its_parent_dies_with_it():
    tag = f"eagle3-test-{os.getpid()}-tied"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-m', 'eagle3_lib.process', 'sleep', '61.{os.getpid()}']); time.sleep(60)  # {tag}"
    holder = subprocess.Popen([sys.executable, "-c", code])
    assert wait_until(lambda: tagged(f"61.{os.getpid()}") and tagged("sleep"))
    time.sleep(0.5)
    holder.kill()
    holder.wait(5)
    assert wait_until(lambda: not [p for p in tagged(f"61.{os.getpid()}") if p.name() == "sleep"])


def test_a_port_in_use_is_named():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Eagle3Error, match=f"port: found {port} in use"):
            base.pick_port(port)


def test_a_server_that_dies_while_loading_shows_its_log(tmp_path):
    command = [sys.executable, "-c", "print('reading weights'); raise SystemExit('no such layer: 31')"]
    server = base.Server("http://127.0.0.1:9", "target", "stub", "0")
    with pytest.raises(Eagle3Error) as error, base.launch(command, {}, tmp_path / "server.log", server, 20):
        pass
    assert "ended with code 1" in str(error.value)
    assert "no such layer: 31" in str(error.value) and "server.log" in str(error.value)


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path):
    tag = f"eagle3-test-{os.getpid()}-mute"
    server = base.Server("http://127.0.0.1:9", "target", "stub", "0")
    started = time.monotonic()
    with (
        pytest.raises(Eagle3Error, match="has not answered"),
        base.launch([sys.executable, "-c", SERVER.replace("TAG", tag)], {}, tmp_path / "server.log", server, 2),
    ):
        pass
    assert time.monotonic() - started < 12
    assert not tagged(tag)
