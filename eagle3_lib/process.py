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

PR_SET_PDEATHSIG = 1
GRACE_S = 4.0


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process ``signum`` when its parent ends. Does nothing where there is no prctl."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signum)


def end_group(group: int, grace_s: float = GRACE_S) -> None:
    """SIGTERM to a process group, and SIGKILL to what is left of it after ``grace_s`` seconds."""
    for signum, wait in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(group, signum)
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return


def supervise(command: list[str]) -> int:
    """Run a command in this process's own group; when it, or our parent, ends, end all of the group.

    Returns:
        the command's exit code. Killed by our parent's death, this process goes down with the group.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)

    def end(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.05)
        os.killpg(0, signal.SIGKILL)

    child = subprocess.Popen(command, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM)
    code = child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # descendants of a command that died alone
    time.sleep(0.2)
    if code < 0:
        code = 128 - code
    sys.stdout.flush()
    _kill_rest()
    return code


def _kill_rest() -> None:
    """SIGKILL to every other process of our group."""
    import psutil

    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp():
                process.kill()
        except (ProcessLookupError, psutil.Error):
            continue


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
