"""Thoughts of recorded answers are captured and render as the ids that the server reported."""

import json
from collections import Counter
from pathlib import Path

import pytest
import stub_server
from test_generate import params_for
from tokenizers import AddedToken, Tokenizer

from eagle3_lib.stages import generate
from eagle3_lib.targets import reasoning
from eagle3_lib.targets.answers import iter_answers
from eagle3_lib.targets.reasoning import Spoken, parse
from eagle3_lib.targets.targets import load_tokenizer

RECORD = json.loads((Path(__file__).parents[1] / "data" / "reasoning_replies.json").read_text())
REPLIES = RECORD["replies"]


@pytest.fixture(scope="module")
def thinking_target(tmp_path_factory, target_folder):
    """The folder of a tokenizer that has the tags as tokens."""
    folder = tmp_path_factory.mktemp("thinking")
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_every_thought_is_captured_and_renders_as_the_servers_ids(tmp_path, thinking_target, stream):
    (tmp_path / "replies.json").write_text(json.dumps(REPLIES))
    with stub_server.running("--fail", 0, "--replies", tmp_path / "replies.json") as server:
        params = params_for(tmp_path, [{"prompt": name} for name in REPLIES], [server], stream=stream)
        summary = generate.run(params.model_copy(update={"target": str(thinking_target)}))
    answers, tokens = {a.prompt: a for a in iter_answers(tmp_path / "out")}, reasoning.Tokens(thinking_target)
    assert len(answers) == len(REPLIES) == 49 and summary["rendered"] == {"ids": 49}
    for name, reply in REPLIES.items():
        answer, text = answers[name], RECORD["outputs"][name.partition(" | ")[0]][1]
        assert answer.output_ids == reply["token_ids"]
        if name.startswith("no thought"):
            assert (
                answer.reasoning_span == []
                and answer.reasoning == ""
                and answer.text == text.removesuffix("<|im_end|>")
            )
            continue
        start, end = answer.reasoning_span
        thought, rest = tokens.decode(answer.output_ids[start:end]), tokens.decode(answer.output_ids[end:])
        assert start == 0 and thought + rest == text
        closed = "</think>" in text
        assert thought.endswith("</think>") == closed and "</think>" not in rest
        assert answer.reasoning == thought.removeprefix("<think>").removesuffix("</think>")
        assert answer.text == rest.removesuffix("<|im_end|>")
        # put together again from its parts, the sample is what the target wrote
        again = ("<think>" if text.startswith("<think>") else "") + answer.reasoning + ("</think>" if closed else "")
        body = answer.output_ids[:-1] if text.endswith("<|im_end|>") else answer.output_ids
        assert tokens.encode(again + answer.text) == body
    thoughts = sum(bool(answer.reasoning_span) for answer in answers.values())
    assert thoughts == 48 and summary["reasoning_tokens"] > 48 and summary["reasoning_share"] == round(48 / 49, 4)


def test_what_a_server_says_that_its_ids_do_not_is_told(thinking_target):
    tokens = reasoning.Tokens(thinking_target)
    reply = REPLIES["kimi | vLLM, deepseek_r1"]
    ids = (reply["prompt_token_ids"], reply["token_ids"])
    said = Spoken("Count: 1, 2, 3. So four.", reply["content"], "reasoning")
    assert reasoning.capture(said, *ids, tokens).rendered == "no"
    # the same text in other tokens than the tokenizer's own
    split = [*tokens.encode("<think>Count: 1, 2, 3. So three.</think>There are th"), *tokens.encode("ree.")]
    said = Spoken("Count: 1, 2, 3. So three.", "There are three.", "reasoning")
    assert reasoning.capture(said, ids[0], split, tokens).rendered == "text"


@pytest.mark.parametrize(
    ("text", "opened", "thought"),
    [
        ("<think>a</think>b", "", "a"),
        ("a</think>b", "", "a"),
        ("a</think>b", "</think>", "a"),
        ("a", "</think>", "a"),
        ("◁think▷a◁/think▷b", "", "a"),
        ("[THINK]a[/THINK]b", "", "a"),
        ("It writes <think> and </think> around thoughts.", "", ""),
        ("plain", "", ""),
    ],
)
def test_tags_in_text(text, opened, thought):
    parts = parse(text, opened)
    assert parts.reasoning == thought and parts.text == text


def test_a_thought_that_a_tool_call_ends(thinking_target):
    tokens = reasoning.Tokens(thinking_target)
    ids = tokens.encode("<think>I need the tool.<tool_call>f()</tool_call>")
    found = reasoning.capture(Spoken("I need the tool.", "", "reasoning_content"), [1], ids, tokens)
    assert tokens.decode(ids[: found.span[1]]).startswith("<think>I need the tool") and found.span[1] < len(ids)
    assert found.rendered == "no"  # the call is not in the text, so the ids are what counts


TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content.strip() }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_without_ids_the_targets_template_gives_them(target_folder, thinking, stopped):
    tokenizer = load_tokenizer(target_folder)
    tokenizer.chat_template = TEMPLATE
    said = Spoken("First this.", "Then that.", "reasoning_content")
    options = {"enable_thinking": True} if thinking else {}
    ids = reasoning.from_template(tokenizer, [{"role": "user", "content": "q"}], [], said, stopped, **options)
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids[0]) == prompt + ("<think>\n" if thinking else "")
    whole = prompt + "<think>\nFirst this.\n</think>\n\nThen that." + ("<|im_end|>" if stopped else "")
    assert tokenizer.decode(ids[0] + ids[1]) == whole


def test_the_prompt_may_open_the_thought():
    assert reasoning.opened_by("<|im_start|>assistant\n<think>\n") == "</think>"
    assert reasoning.opened_by("<think>\n\n</think>\n\n") == ""
    assert Counter(reasoning.opened_by(tail) for tail, _ in RECORD["outputs"].values())["</think>"] == 2
