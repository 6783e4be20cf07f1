"""Pages in a headless Chromium by Playwright: how they look, what they request, what axe-core finds in them.

python tests/pages/browser.py FOLDER [REPORTS]     screenshots of every page in reports/ into a folder, at both widths
                                                   and in both schemes; says what pages request and what axe finds
"""

import contextlib
import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SCHEMES, WIDTHS = ("light", "dark"), (1400, 400)
PHONE = 600  # CSS pixels; a narrower page is shown as on a phone


def find() -> str | None:
    """The command of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def start(command: str) -> Iterator[Browser]:
    """Run the installed Chromium of this command; it ends with the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Browser, path: Path, width: int = 1400, scheme: str = "light") -> Iterator[tuple[Page, list[str]]]:
    """A file as it looks at a width (CSS pixels) in a colour scheme, loaded with the network off.

    Yields:
        the page, and the URLs that it has requested so far; the first one is its own.
    """
    viewport = {"width": width, "height": 900}
    context = browser.new_context(viewport=viewport, is_mobile=width < PHONE, color_scheme=scheme, offline=True)
    try:
        page, requests = context.new_page(), []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.resolve().as_uri())
        yield page, requests
    finally:
        context.close()


def violations(page: Page) -> list[dict]:
    """What axe-core finds wrong: [{"id", "impact", "help", "nodes", ...}]."""
    return Axe().run(page).response["violations"]


def serious(violation: dict) -> bool:
    """Whether axe-core calls a violation serious or critical."""
    return violation["impact"] in ("serious", "critical")


def main(folder: Path, reports: Path) -> None:
    """Take the screenshots and print what is wrong; the exit status is 1 if anything is."""
    folder.mkdir(parents=True, exist_ok=True)
    command = find()
    if command is None:
        sys.exit(f"no Chromium: looked for {', '.join(NAMES)}")
    pages, faults = sorted(reports.rglob("*.html")), []
    with start(command) as browser:
        for path, width, scheme in itertools.product(pages, WIDTHS, SCHEMES):
            name = f"{path.parent.name}.{path.stem}.{width}.{scheme}"
            with opened(browser, path, width, scheme) as (page, requests):
                page.screenshot(path=folder / f"{name}.png", full_page=True)
                faults += [f"{name}: asks for {url}" for url in requests[1:]]
                found = filter(serious, violations(page))
                faults += [f"{name}: {v['impact']}, {v['id']}: {v['help']}" for v in found]
    print("\n".join(faults) or f"{len(pages)} pages, no request, no serious finding")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "reports")
