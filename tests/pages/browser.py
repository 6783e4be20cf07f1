"""A headless Chromium spoken to over its DevTools pipe: what a page looks like, what it requests, what axe finds in it.

python tests/pages/browser.py FOLDER [REPORTS]     screenshots of every page in reports/ into a folder, at both widths
                                                   and in both schemes; says what pages request and what axe finds
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
AXE = "axe-core@4.11.0"
# What DevTools calls the scheme is the media feature's value.
SCHEMES, WIDTHS = ("light", "dark"), (1400, 400)
# DevTools' pipe is file descriptors 3 (commands) and 4 (answers) of the browser.
PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(pipes[0], 3), os.dup2(pipes[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
AUDIT = "axe.run({resultTypes: ['violations']}).then(found => JSON.stringify(found.violations))"


def find() -> str | None:
    """The command of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def install_axe(folder: Path) -> str | None:
    """The source of axe-core as npm has it, or None where there is no npm or no registry."""
    npm = shutil.which("npm")
    if npm is None:
        return None
    command = [npm, "install", "--silent", "--no-save", "--prefix", str(folder), AXE]
    if subprocess.run(command, capture_output=True, cwd=folder).returncode:
        return None
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


def serious(violation: dict) -> bool:
    return violation["impact"] in ("serious", "critical")


class Browser:
    """One page of a running Chromium. ``requests`` holds the URLs that the page asked for since it was opened."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from, self._last, self._session = to_browser, from_browser, 0, None
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params) -> dict:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> dict:
        message = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser ended")
            message += byte
        event = json.loads(message)
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        return event

    def open(self, path: Path, width: int = 1400, scheme: str = "light") -> None:
        """Load a file with the network off, as it looks at a width (CSS pixels) in a colour scheme."""
        self.requests.clear()
        self._call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Page.navigate", url=path.resolve().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str):
        """The value of a JavaScript expression in the page (a promise is awaited)."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", answer))
        return answer["result"].get("value")

    def violations(self, axe: str) -> list[dict]:
        """What axe-core finds wrong: [{"id", "impact", "help", "nodes", ...}]."""
        self.evaluate(axe + ";0")
        return json.loads(self.evaluate(AUDIT))

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def start(command: str) -> Iterator[Browser]:
    """Run Chromium and yield its one page; it ends with the block."""
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [command, "--headless=new", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        words += ["--disable-gpu", "--hide-scrollbars", "about:blank"]
        placed = [sys.executable, "-c", PIPES, str(read_there), str(write_there), *words]
        process = subprocess.Popen(placed, pass_fds=(read_there, write_there), stderr=subprocess.DEVNULL)
        os.close(read_there)
        os.close(write_there)
        try:
            with open(write_here, "wb", buffering=0) as to_browser, open(read_here, "rb") as from_browser:
                yield Browser(to_browser, from_browser)
        finally:
            process.terminate()
            process.wait()


def main(folder: Path, reports: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = find() or sys.exit(f"no Chromium: looked for {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as work:
        axe = install_axe(Path(work)) or sys.exit(f"npm did not install {AXE}")
    faults = []
    with start(command) as browser:
        pages = sorted(reports.rglob("*.html"))
        for page, width, scheme in itertools.product(pages, WIDTHS, SCHEMES):
            name = f"{page.parent.name}.{page.stem}.{width}.{scheme}"
            browser.open(page, width, scheme)
            browser.screenshot(folder / f"{name}.png")
            faults += [f"{name}: asks for {url}" for url in browser.requests[1:]]
            faults += [f"{name}: {v['impact']}, {v['id']}: {v['help']}" for v in browser.violations(axe) if serious(v)]
    print("\n".join(faults) or f"{len(pages)} pages, no request, no serious finding")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "reports")
