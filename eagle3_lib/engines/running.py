"""A server that runs already: what it is, what it tells of its configuration, and whether its rounds can be replayed.

It is asked, and nothing on it is changed. :func:`find` speaks to it first; what an engine tells stands in ``told.py`` of its
package. The server that :func:`find` returns is asked by :mod:`eagle3_lib.engines.serving` as one that the project started.
"""

import json
from dataclasses import replace
from typing import Any

import httpx

from ..errors import Eagle3Error
from ..params import GREEDY
from . import meaning, serving
from .access import Access
from .base import Server
from .definitions import Definitions
from .registry import ENGINES
from .spec import EngineSpec
from .told import PLAIN, Card
from .told import Busy as Busy
from .told import Told as Told

METHOD = "eagle3"
TLS_HINTS = (
    ("CERTIFICATE_VERIFY_FAILED", "expected a certificate that is trusted here: ca_file names its authority's, verify: false skips it"),
    ("WRONG_VERSION_NUMBER", "does the server speak http, not https?"),
    ("RECORD_LAYER_FAILURE", "does the server speak http, not https?"),
)  # fmt: skip


def find(access: Access, model: str = "", stall_s: float = 300) -> tuple[Server, Told]:
    """The engine at an address, and what it tells of itself; asks it one or two short completions.

    Args:
        model: the name to ask for; "" is the only model that is served.
        stall_s: a completion that gets no token for so long has met a hang.
    Raises:
        Eagle3Error: nothing answers there, the key is refused, it is no engine that the project knows, it serves several
            models and none is named, or it gives no token ids.
    """
    cards = _cards(access)
    card = _chosen(access, cards, model)
    unknown = Server(access.root, card.id, "server", "", stall_s=stall_s, access=access)
    named = sorted(ENGINES.values(), key=lambda engine: engine.spec.name != card.owner)
    for engine in named:
        version = engine.running.recognised(unknown, card.owner)
        if version is not None:
            server = Server(
                access.root,
                card.id,
                engine.spec.name,
                version,
                stall_s=stall_s,
                definitions=_definitions(engine.spec, version),
                access=access,
            )
            try:
                told = engine.running.told(server, card, [card.id for card in cards])
            except Eagle3Error as error:
                hint = "; does a proxy between strip fields?" if "no token ids" in str(error) else ""
                raise Eagle3Error(f"{access.root}: {error}{hint}") from None
            return replace(server, tells_rounds=bool(told.tells_rounds)), told
    raise Eagle3Error(
        f"{access.root} serves {card.id!r} of {card.owner!r} and is none of {', '.join(ENGINES)}: found no vllm: metrics in "
        f"/metrics, and no version with a model_path in /server_info or /get_server_info; expected one of these engines, or a "
        f"proxy that lets these paths through"
    )


def refuse(told: Told, temperature: float) -> None:
    """Refuse a server whose rounds the replay of an EAGLE-3 drafter cannot be held against; what is untold is let pass.

    Raises:
        Eagle3Error: naming the setting: a LoRA adapter, no speculation, another drafter than EAGLE-3, a tree, made-up or
            lossy acceptance (:mod:`eagle3_lib.engines.meaning`), rounds that the stream joins.
    """
    if told.parent:
        raise Eagle3Error(
            f"model: found {told.model!r}, a LoRA adapter of {told.parent!r}; expected the model that the drafter was trained on"
        )
    if told.method == PLAIN:
        raise Eagle3Error(
            f"method: found a server that does not speculate ({told.positions_from}); expected {METHOD!r}"
        )
    if told.method not in ("", METHOD):
        also = ", which stands for EAGLE-1, EAGLE-2 and a target's own MTP layers" if told.method == "eagle" else ""
        raise Eagle3Error(
            f"method: found {told.method!r}{also}; expected {METHOD!r}: the replay is one of an EAGLE-3 drafter"
        )
    meaning.refuse(told.engine, told.options, told.engine_args, {}, temperature)
    if not told.tells_rounds and (told.stream_interval or 1) > 1:
        raise Eagle3Error(
            f"stream_interval: found {told.stream_interval}: a streamed chunk joins several rounds, and no answer tells them; "
            f"expected 1"
        )


def busy(server: Server) -> Busy | None:
    """What the server does now and has done since its start; None where it does not tell."""
    return ENGINES[server.engine].running.busy(server)


def greedy(server: Server, prompt_ids: list[int], tokens: int, salt: str = "") -> list[int]:
    """The server's own greedy tokens after a prompt, to hold against those of the target's folder."""
    return serving.complete(server, prompt_ids, tokens, GREEDY, stream=False, salt=salt).output_ids


def _definitions(spec: EngineSpec, version: str) -> Definitions:
    """What a version calls its counts; as in the newest one where the version is not told ("", "dev")."""
    return spec.definitions_in(version) if version[:1].isdecimal() else spec.definitions[-1]


def _cards(access: Access) -> list[Card]:
    """What /v1/models lists.

    Raises:
        Eagle3Error: nothing answers, it refuses the key, or it is no list of models.
    """
    url = f"{access.root}/v1/models"
    try:
        reply = access.http().get("/v1/models")
    except httpx.TimeoutException:
        raise Eagle3Error(f"url: {url} gave no answer in {access.timeout_s:g} s; expected a running server") from None
    except (httpx.HTTPError, ValueError) as error:
        words = access.hide(str(error))
        hint = next((hint for sign, hint in TLS_HINTS if sign in words), "expected a running server")
        raise Eagle3Error(f"url: {url} cannot be reached ({words}); {hint}") from None
    if reply.status_code in (401, 403):
        given = "the key that was given" if access.key or access.headers else "a request without a key"
        raise Eagle3Error(
            f"key: {url} refuses {given} ({reply.status_code}); expected the key that the server was given (--api-key)"
        )
    if reply.is_redirect:
        where = access.hide(reply.headers.get("location", "?"))
        raise Eagle3Error(f"url: {url} sends on to {where}; expected the address itself: a key is not carried on")
    try:
        body: Any = reply.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    if reply.status_code != 200 or not isinstance(body, dict) or not isinstance(body.get("data"), list):
        found = _described(access, reply)
        raise Eagle3Error(f"url: {url} answers {found}; expected the list of models of an OpenAI-compatible server")
    cards = [_card(row) for row in body["data"] if isinstance(row, dict) and row.get("id")]
    if not cards:
        raise Eagle3Error(f"url: {url} lists no model; expected one")
    return cards


def _described(access: Access, reply: httpx.Response) -> str:
    if "html" in reply.headers.get("content-type", ""):
        return f"{reply.status_code} with a web page"
    words = access.hide(" ".join(reply.text.split()))[:200]
    return f"{reply.status_code} {words!r}"


def _card(row: dict[str, Any]) -> Card:
    length = row.get("max_model_len")
    return Card(
        str(row["id"]),
        str(row.get("root") or ""),
        str(row.get("parent") or ""),
        str(row.get("owned_by") or ""),
        length if isinstance(length, int) else None,
    )


def _chosen(access: Access, cards: list[Card], model: str) -> Card:
    """The entry of the model to ask for; several names of one model are one.

    Raises:
        Eagle3Error: it is not served, or none is named and several are.
    """
    listed = ", ".join(f"{card.id!r} (LoRA of {card.parent!r})" if card.parent else repr(card.id) for card in cards)
    if model:
        named = [card for card in cards if card.id == model]
        if not named:
            raise Eagle3Error(f"model: found {model!r}, expected one that {access.root} serves: {listed}")
        return named[0]
    if len({(card.root or card.id, card.parent) for card in cards}) > 1:
        raise Eagle3Error(f"model: found none, expected one of those that {access.root} serves: {listed}")
    return cards[0]
