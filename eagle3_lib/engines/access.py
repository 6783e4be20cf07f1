"""How a server is reached: address, key, headers, TLS; and the connection pools, one a server."""

import functools
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
import openai

from ..errors import Eagle3Error
from ..params import Reached
from ..paths import project_path

API_PATH = re.compile(r"/v1(/(chat/)?completions|/models)?$")
SHORT_SECRET = 8  # a shorter one is hidden only where it stands as a word
HIDDEN = "***"
NO_KEY = "none"


@dataclass(frozen=True)
class Access:
    """How a server is reached.

    url: its address, with a path prefix where a proxy has one; "/", "/v1" and paths of the API at its end are cut off.
    key: sent as "Authorization: Bearer KEY". headers: sent with every request; one named Authorization replaces the key.
    ca_file: certificates to trust, as PEM, instead of the system's. verify: check the server's certificate. timeout_s: of the
    short questions about the server; an answer waits as long as :class:`eagle3_lib.engines.base.Server` says.

    Key and header values stand in no repr, and :meth:`hide` takes them out of a text.

    Raises:
        Eagle3Error: the address is none, or a key or header cannot be sent.
    """

    url: str
    key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    ca_file: str = ""
    verify: bool = True
    timeout_s: float = 30

    def __post_init__(self) -> None:
        try:
            address = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise Eagle3Error(f"url: found no address ({error}), expected http://HOST:PORT") from None
        if "@" in self.url or address.query or address.fragment:
            raise Eagle3Error(
                "url: found a user name, a query or a fragment in the address; expected http://HOST:PORT, and what a proxy "
                "wants besides in headers"
            )
        if address.scheme not in ("http", "https") or not address.host:
            raise Eagle3Error(f"url: found {self.url!r}, expected http://HOST:PORT or https://HOST:PORT")
        if not _can_be_sent(self.key):
            raise Eagle3Error("key: found a blank, a line end or a character beyond ASCII in it, expected none")
        for name, value in self.headers.items():
            if not name or not _can_be_sent(name) or not _can_be_sent(value.replace(" ", "")):
                raise Eagle3Error(f"headers: {name!r}: found a line end or a character beyond ASCII, expected none")
        if self.ca_file and not project_path(self.ca_file).is_file():
            raise Eagle3Error(f"ca_file: found no file {self.ca_file}, expected one with certificates (PEM)")

    @property
    def root(self) -> str:
        """The address to which "/v1/models", "/health" and so on are added."""
        return API_PATH.sub("", self.url.rstrip("/"))

    @property
    def authorization(self) -> dict[str, str]:
        """All headers: those given, and the key's."""
        given = {name.lower() for name in self.headers}
        keys = {"Authorization": f"Bearer {self.key}"} if self.key and "authorization" not in given else {}
        return keys | dict(self.headers)

    def http(self) -> httpx.Client:
        """The server's pool of connections. Redirects are not followed: another host would get the headers."""
        return _pool(self)

    def openai(self, timeout_s: float) -> openai.OpenAI:
        """The OpenAI client, on the same pool, which waits ``timeout_s`` for the next bytes of an answer."""
        return _openai(self, timeout_s)

    def hide(self, text: str) -> str:
        """A text without the key and the values of headers."""
        words = [self.key] + [word for value in self.headers.values() for word in (value, *value.split())]
        for secret in sorted(filter(None, words), key=len, reverse=True):
            pattern = re.escape(secret)
            text = re.sub(pattern if len(secret) >= SHORT_SECRET else rf"(?<!\w){pattern}(?!\w)", HIDDEN, text)
        return text

    def cause(self, error: Exception) -> Exception | None:
        """``error`` as the cause of another one: None where its words hold a secret, so that no traceback shows it."""
        words = str(error)
        return error if self.hide(words) == words else None


def of_params(params: Reached, url: str) -> Access:
    """How a server at an address is reached by a stage's parameters; key and header values come from the environment.

    Raises:
        Eagle3Error: an environment variable that is named and not set, or what :class:`Access` refuses.
    """
    names = {"api_key_env": params.api_key_env} if params.api_key_env else {}
    names |= {f"headers_env: {header}": name for header, name in params.headers_env.items()}
    for field_name, name in names.items():
        if not os.environ.get(name):
            raise Eagle3Error(f"{field_name}: found no environment variable {name}, expected one that holds the value")
    headers = {header: os.environ[name] for header, name in params.headers_env.items()}
    key = os.environ[params.api_key_env] if params.api_key_env else ""
    return Access(url, key, headers, params.ca_file, params.verify_tls)


def _can_be_sent(value: str) -> bool:
    return value.isascii() and all(character.isprintable() and character != " " for character in value)


@functools.cache
def _pool(access: Access) -> httpx.Client:
    """One pool a server: making a client takes longer than a token on a GPU."""
    verify: ssl.SSLContext | bool = access.verify
    if access.verify and access.ca_file:
        try:
            verify = ssl.create_default_context(cafile=project_path(access.ca_file))
        except ssl.SSLError as error:
            raise Eagle3Error(
                f"ca_file: {access.ca_file}: found no certificates in it ({error}), expected PEM"
            ) from error
    return httpx.Client(
        base_url=access.root,
        headers=access.authorization,
        verify=verify,
        timeout=access.timeout_s,
        limits=httpx.Limits(max_connections=None),
        event_hooks={"request": [_without_placeholder]},
    )


@functools.cache
def _openai(access: Access, timeout_s: float) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{access.root}/v1",
        api_key=NO_KEY,
        timeout=timeout_s,
        max_retries=0,
        default_headers=access.authorization,
        http_client=access.http(),
    )


def _without_placeholder(request: httpx.Request) -> None:
    """The OpenAI client does not go without a key; a server without one need not see it."""
    if request.headers.get("authorization") == f"Bearer {NO_KEY}":
        del request.headers["authorization"]
