"""The target's side: a real server renders conversations to the token ids that training renders."""

import pytest

from eagle3_lib.compat import chat_template, gates
from eagle3_lib.engines.access import Access
from eagle3_lib.engines.vllm import server as vllm
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.targets import targets

pytestmark = pytest.mark.skipif(gates.source_tree("vllm") is None, reason="vLLM is not installed")
CONVERSATIONS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "  Café, naïve \u2603 \n"}],
    [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "def f(x):\n\treturn x"},
    ],
]


def test_template_parity_with_the_server(tmp_path):
    folder = targets.resolve(targets.SMOLLM2)
    tokenizer = targets.load_tokenizer(folder)
    with vllm.serve(BenchmarkParams(max_model_len=256), folder, tmp_path / "log") as server:
        served = chat_template.served_ids(server.reached, server.model, CONVERSATIONS)
        with pytest.raises(Eagle3Error, match="/nothing/tokenize"):
            chat_template.served_ids(Access(f"{server.url}/nothing"), server.model, CONVERSATIONS)
    assert [f.severity for f in chat_template.template_parity(tokenizer, CONVERSATIONS, served)] == ["ok"]
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>assistant", "<|im_start|> assistant")
    assert [f.severity for f in chat_template.template_parity(tokenizer, CONVERSATIONS, served)] == ["wrong"]
