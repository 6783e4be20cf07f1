"""What a published file must not show: folders of this machine, its user and host, private addresses, secrets.

python -m eagle3_lib.reports.leaks reports      looks through a folder and says what it found
"""

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import Eagle3Error
from ..paths import ROOT

TEXT_ENDINGS = (".html", ".json", ".jsonl", ".csv", ".svg", ".yaml", ".md", ".txt")
# Words that name nobody: as a user or host name they would be found in any text.
NOBODY = {"root", "user", "admin", "runner", "ubuntu", "debian", "jovyan", "localhost", "node", "main", "base"}
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL")
# Prefixes as their issuers document them: Hugging Face, OpenAI, GitHub, GitLab, AWS, NVIDIA, Slack, Google; then JSON web
# tokens and authorization headers.
TOKENS = (
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bnvapi-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{35}"
    r"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+|\bBearer\s+[\w.~+/-]{20,}"
)
ANYWHERE = {
    "a home folder": r"(?:/home|/Users|/root)/[\w.-]+|\b[A-Za-z]:\\+Users\\+[\w.-]+",
    "a temporary folder": r"(?<![\w.])/(?:var/)?tmp/[\w.-]+|/var/folders/[\w.-]+",
    "a private address": r"(?<![\w.])(?:10(?:\.\d{1,3}){3}|192\.168(?:\.\d{1,3}){2}|172\.(?:1[6-9]|2\d|3[01])(?:\.\d{1,3}){2})(?![\w.])",
    "a private host name": r"\b[a-z][\w-]*(?:\.[\w-]+)*\.(?:internal|intranet|corp|lan|localdomain|cluster\.local)\b",
}
SECRET = {
    "a token": TOKENS,
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'<>]+:[^\s/@\"'<>]+@",
}


@dataclass(frozen=True)
class Leak:
    """kind: what it is; line: from 1; shown: the text around it, or the first characters where it is a secret."""

    kind: str
    line: int
    shown: str


def find(text: str, allow: tuple[str, ...] = ()) -> Iterator[Leak]:
    """Every leak in a text. ``allow``: texts that are known to be harmless where they are found."""
    shown = text  # without its secrets, which no message tells again
    for kind, pattern in [*SECRET.items(), *_of_the_environment()]:
        for match in re.finditer(pattern, text):
            if match.group() not in allow:
                yield Leak(kind, _line(text, match), f"{match.group()[:4]}... (not shown)")
                shown = shown[: match.start()] + "*" * len(match.group()) + shown[match.end() :]
    for kind, pattern in [*_of_this_machine(), *ANYWHERE.items()]:
        for match in re.finditer(pattern, text):
            if match.group() not in allow:
                around = shown[max(0, match.start() - 60) : match.end() + 40].replace("\n", " ")
                yield Leak(kind, _line(text, match), f"...{around}...")


def _line(text: str, match: re.Match) -> int:
    return text.count("\n", 0, match.start()) + 1


def refuse(text: str, where: str, allow: tuple[str, ...] = ()) -> None:
    """Nothing published may show where and by whom it was made, or a secret.

    Raises:
        Eagle3Error: naming the file and each place.
    """
    found = [f"{where}: shows {leak.kind}: {leak.shown} (line {leak.line})" for leak in find(text, allow)]
    if found:
        more = [f"and {len(found) - 10} more"] if len(found) > 10 else []
        hint = "What is harmless passes with: eagle3 publish NAME --allow TEXT"
        raise Eagle3Error("\n".join([*found[:10], *more, hint]))


def refuse_folder(folder: Path, called: str, allow: tuple[str, ...] = ()) -> int:
    """:func:`refuse` for every text file below ``folder``, named as below ``called``; returns how many were read.

    A figure's PDF is compressed and not read: the SVG beside it holds the same text.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in TEXT_ENDINGS)
    for path in paths:
        refuse(path.read_text(), f"{called}/{path.relative_to(folder)}", allow)
    return len(paths)


def _of_the_environment() -> list[tuple[str, str]]:
    """Patterns of the values of environment variables that are secrets by their name."""
    return [
        (f"the value of {name}", re.escape(value))
        for name, value in sorted(os.environ.items())
        if SECRET_NAMES.search(name.upper()) and len(value) >= 12
    ]


def _of_this_machine() -> list[tuple[str, str]]:
    """Patterns of what only this machine has: its folders, its user, its host."""
    folders = {str(ROOT), str(Path.home()), tempfile.gettempdir()} - {"/", "/tmp"}
    found = [("a folder of this machine", rf"{re.escape(folder)}(?![\w.-])") for folder in sorted(folders)]
    host = socket.gethostname()
    for kind, names in (("the user's name", {_user()}), ("this host's name", {host, host.split(".")[0]})):
        for name in sorted(names):
            if len(name) > 3 and name.lower() not in NOBODY:
                found.append((kind, rf"(?<![\w.-]){re.escape(name)}(?![\w-])"))
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return ""


if __name__ == "__main__":
    try:
        print(f"{refuse_folder(Path(sys.argv[1]), sys.argv[1])} files, no leak")
    except Eagle3Error as error:
        sys.exit(str(error))
