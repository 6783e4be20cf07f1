"""Whether a running server renders conversations to the token ids that training rendered."""

import httpx

from ..engines.access import Access
from ..errors import Eagle3Error
from ..targets import targets
from .findings import Finding


def served_ids(access: Access, model: str, conversations: list[list[dict]]) -> list[list[int]]:
    """Token ids to which a running vLLM renders conversations, with the generation prompt (its route /tokenize).

    Raises:
        Eagle3Error: the server has no such route, or refuses.
    """
    found = []
    for messages in conversations:
        question = {"model": model, "messages": messages, "add_generation_prompt": True}
        try:
            answer = access.http().post("/tokenize", json=question, timeout=60).raise_for_status()
            found.append(answer.json()["tokens"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            said = access.hide(str(error))
            raise Eagle3Error(
                f"{access.root}/tokenize: found no token ids of a conversation: {said}"
            ) from access.cause(error)
    return found


def template_parity(tokenizer, conversations: list[list[dict]], server_ids: list[list[int]]) -> list[Finding]:
    """Whether the server renders conversations to the token ids that training rendered.

    Args:
        tokenizer: the one that training used.
        conversations: chat messages.
        server_ids: what the server's /tokenize made of each, with the generation prompt.
    """
    for messages, theirs in zip(conversations, server_ids, strict=True):
        ours = targets.render(tokenizer, messages)
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            what = f"token ids differ from position {at} on: {ours[at : at + 4]} here, {theirs[at : at + 4]} served"
            return [Finding("wrong", "template", what, "the server's /tokenize", "train and serve with one template")]
    what = f"{len(conversations)} conversations, equal token ids"
    return [Finding("ok", "template", what, "the server's /tokenize", "none needed")]
