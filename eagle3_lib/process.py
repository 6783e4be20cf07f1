"""Processes that never outlive whoever started them (Linux: prctl PR_SET_PDEATHSIG).

    python -m eagle3_lib.process COMMAND ...          run COMMAND; it is killed when the parent dies
    python -m eagle3_lib.process --group COMMAND ...  the same for COMMAND and all of its descendants

An engine server is several processes: when only the first one is killed, vLLM's engine core and workers live on and keep
their memory. So a server runs below a supervisor (``--group``) that leads a process group of its own, watches both its
parent and the server, and ends the whole group when either is gone.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG = 1
GRACE_S = 4


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process ``signum`` when its parent ends. Does nothing where there is no prctl."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signum)


def end_group(leader: subprocess.Popen, grace_s: float = GRACE_S + 2) -> None:
    """SIGTERM to the process group that a child leads, and SIGKILL to what is left of it after ``grace_s`` seconds."""
    for signum, wait in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(leader.pid, signum)
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline:
                leader.poll()  # a leader that ended and is not waited for keeps its group alive
                os.killpg(leader.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return


def supervise(command: list[str]) -> int:
    """Run a command in this process's own group; when it, or our parent, ends, end all of the group.

    Returns:
        the command's exit code, 128 + N where signal N ended it.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    child = subprocess.Popen(command, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    signal.signal(signal.SIGTERM, lambda *_: (_signal_rest(signal.SIGTERM), signal.alarm(GRACE_S)))
    signal.signal(signal.SIGALRM, lambda *_: _signal_rest(signal.SIGKILL))
    die_with_parent(signal.SIGTERM)
    code = child.wait()
    deadline = time.monotonic() + GRACE_S
    while _signal_rest(signal.SIGTERM) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal_rest(signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _signal_rest(signum: int) -> int:
    """Send a signal to every other live process of our group; how many there were."""
    others = 0
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp():
                others += process.status() != psutil.STATUS_ZOMBIE
                process.send_signal(signum)
        except (ProcessLookupError, psutil.Error):
            continue
    return others


def main() -> None:
    command = sys.argv[1:]
    if command[:1] == ["--group"]:
        sys.exit(supervise(command[1:]))
    if not command:
        sys.exit(__doc__)
    die_with_parent()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
