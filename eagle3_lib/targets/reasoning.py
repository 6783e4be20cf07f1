"""Reasoning in an answer: from any of the ways in which servers return it to the text that the target produced.

A server with a reasoning parser returns the thought apart, as ``reasoning`` (vLLM) or ``reasoning_content`` (SGLang,
DeepSeek, vLLM before 0.12), some with outer white space stripped; one without leaves the tags in the text. Training text
must have the thought where the target wrote it, between the target's own tags. Where the server returns token ids they
are that text, and what it said apart is checked against them; where it does not, the text is wrapped.
"""

from dataclasses import dataclass
from pathlib import Path

from ..errors import Eagle3Error
from ..paths import short_path

TAGS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, Kimi-K2-Thinking, Kimi-K2.5, GLM-4.5, MiniMax-M2
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<thinking>", "</thinking>"),
)
GAPS = (("", "", ""), ("\n", "\n", "\n\n"), ("\n", "\n", "\n"), ("", "", "\n\n"), ("", "", "\n"), ("\n", "\n", ""))
PROMPT_TAIL = 32  # tokens of the prompt in which a template may have opened the thought


@dataclass(frozen=True)
class Spoken:
    """What a server said, as it said it. ``field``: where the reasoning stood, "" where it was not apart."""

    reasoning: str
    content: str
    field: str = ""


@dataclass(frozen=True)
class Parts:
    """An answer's text in pieces: joined they are the text. ``open`` is "" where the prompt opened the thought."""

    open: str
    reasoning: str
    close: str
    content: str

    @property
    def thinks(self) -> bool:
        return bool(self.open or self.close or self.reasoning)

    @property
    def text(self) -> str:
        return self.open + self.reasoning + self.close + self.content

    @property
    def thought_end(self) -> int:
        """Characters up to the end of the thought, its closing tag included."""
        return len(self.text) - len(self.content)


def spoken(message: dict) -> Spoken:
    """What one assistant message of a reply says."""
    content = message.get("content") or ""
    for name in ("reasoning", "reasoning_content"):
        if message.get(name):
            return Spoken(message[name], content, name)
    return Spoken("", content)


def opened_by(prompt_tail: str) -> str:
    """The closing tag of a thought that the prompt left open, or "": so do templates that force the target to think."""
    for opening, closing in TAGS:
        place = prompt_tail.rfind(opening)
        if place >= 0 and closing not in prompt_tail[place:]:
            return closing
    return ""


def parse(text: str, opened: str = "") -> Parts:
    """The pieces of an answer's text.

    Args:
        opened: closing tag of a thought that the prompt opened (:func:`opened_by`).
    """
    for opening, closing in TAGS:
        before, tag, after = text.partition(opening)
        if tag and not before.strip():
            return Parts(before + tag, *after.partition(closing))
        thought, tag, content = text.partition(closing)
        if tag and (closing == opened or opening not in thought):
            return Parts("", thought, tag, content)
        if closing == opened:
            return Parts("", text, "", "")  # cut inside the thought
    return Parts("", "", "", text)


def wrapped(said: Spoken, tags: tuple[str, str], opened: bool, gaps: tuple[str, str, str] = GAPS[0]) -> str:
    """The text of an answer whose reasoning came apart, with the white space that a template puts around it."""
    begin, end, after = gaps
    opening = "" if opened else tags[0] + begin
    closed = end + tags[1] + after + said.content if said.content else ""
    return opening + said.reasoning + closed


class Tokens:
    """A target's tokenizer for text to ids and back, special tokens kept; loads without transformers.

    Raises:
        Eagle3Error: the folder has no tokenizer.json.
    """

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise Eagle3Error(f"{short_path(path)}: no such file; expected the target's tokenizer")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def tokens_up_to(self, ids: list[int], characters: int) -> int:
        """How many of ``ids`` spell the first ``characters`` of their text."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(ids[:middle])) < characters:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True)
class Captured:
    """An answer's reasoning and content, and where in its ids the thought lies.

    reasoning, content: with the white space that the target wrote. span: [start, end) in the output ids, tags included;
    [] without a thought. rendered: "ids": what the server said, between the target's tags, has exactly the ids that the
    server reported; "text": it has the same text, but the target chose other tokens for it; "no": it is not the text of
    the ids (servers take tool calls out of the text).
    """

    reasoning: str
    content: str
    span: list[int]
    rendered: str


def capture(said: Spoken, prompt_ids: list[int], output_ids: list[int], tokens: Tokens) -> Captured:
    """Bring together what a server said and the ids that it reported."""
    body_ids = output_ids[:-1] if output_ids and output_ids[-1] in tokens.special else output_ids
    body = tokens.decode(body_ids)
    opened = opened_by(tokens.decode(prompt_ids[-PROMPT_TAIL:]))
    parts = parse(body, opened)
    if said.reasoning and not parts.close and parts.reasoning.startswith(said.reasoning):
        parts = Parts(
            parts.open, said.reasoning, "", parts.reasoning[len(said.reasoning) :]
        )  # a call ended the thought
    span = [0, tokens.tokens_up_to(body_ids, parts.thought_end)] if parts.thinks else []
    if not _same(said, parts):
        return Captured(said.reasoning, said.content, span, "no")
    return Captured(parts.reasoning, parts.content, span, "ids" if tokens.encode(body) == body_ids else "text")


def _same(said: Spoken, parts: Parts) -> bool:
    """The server's words are the text of its ids, but for outer white space, which some servers strip."""
    if said.field:
        pairs = [(said.reasoning, parts.reasoning), (said.content, parts.content)]
        return all(ours.strip() == theirs.strip() for ours, theirs in pairs)
    without_tags = parts.reasoning + parts.content  # tags that are special tokens are left out of a server's text
    return said.content.strip() in (parts.text.strip(), without_tags.strip())


def from_template(tokenizer, messages: list[dict], tools: list[dict], said: Spoken, stopped: bool, **options):
    """Ids of a prompt and an answer by the target's chat template, for a server that returns none.

    Args:
        tokenizer: the target's, as transformers loads it.
        stopped: the target ended its turn itself, so its end token belongs to the answer.
        options: further variables of the template (``enable_thinking``).
    Returns:
        (prompt ids, output ids).
    """

    def render(turns: list[dict], **how) -> str:
        return tokenizer.apply_chat_template(turns, tools=tools or None, tokenize=False, **how, **options)

    prompt = render(messages, add_generation_prompt=True)
    opened = opened_by(prompt[-200:])
    answer = {"role": "assistant", "content": said.content}
    whole = render([*messages, answer | ({"reasoning_content": said.reasoning} if said.field else {})])
    text = said.content
    if said.field:
        pair = next((p for p in TAGS if p[1] == opened or p[0] in (tokenizer.chat_template or "")), TAGS[0])
        texts = [wrapped(said, pair, bool(opened), gaps) for gaps in GAPS]
        text = next((text for text in texts if text in whole), texts[0])
    end = whole.rpartition(text)[2].strip() or tokenizer.eos_token if stopped else ""
    first = tokenizer(end, add_special_tokens=False)["input_ids"][:1] if end else []
    encode = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in (prompt, text)]
    return encode[0], encode[1] + first
