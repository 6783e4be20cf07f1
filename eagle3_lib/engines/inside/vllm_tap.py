"""Runs inside vLLM's interpreter: the hidden states of token sequences, by vLLM's own extract_hidden_states.

    python -m eagle3_lib.engines.inside.vllm_tap CASE.json

It reads lines of JSON, lists of token sequences, and answers each with a line of safetensors paths, one a sequence, with
``hidden_states`` [tokens, boundaries, Ht]; the reader removes them. Nothing here imports the rest of the project, which
this interpreter may not have.

vLLM's ids are boundaries (its EAGLE-3 hook captures the stream before layer k), taken before the final norm also at the
last one. Read in vLLM 0.32: distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py.
"""

import json
import os
import sys
from typing import Any


def __getattr__(name: str) -> Any:
    """``HiddenStatesConnector``, made when vLLM asks for it by name (kv_connector_module_path)."""
    if name != "HiddenStatesConnector":
        raise AttributeError(name)
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllm_module

    class Done:
        """What stands for a finished copy where there is no CUDA event."""

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    class HiddenStatesConnector(vllm_module.ExampleHiddenStatesConnector):
        """vLLM's connector, which copies through pinned memory and CUDA events, also on a CPU."""

        def _submit_async_write(self, pending: Any) -> None:
            if self._kv_cache.is_cuda:
                super()._submit_async_write(pending)
                return
            blocks = torch.tensor(pending.block_ids).unsqueeze(1) * self._block_size
            slots = (blocks + torch.arange(self._block_size)).flatten()
            states = vllm_module.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
            tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
            os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
            lock = self._lock_fds.pop(pending.req_id, None)
            future = self._executor.submit(self._write_tensors, tensors, Done(), pending.filename, lock)
            self._req_copy_events[pending.req_id] = Done()
            self._req_futures[pending.req_id] = future
            future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))

    globals()[name] = HiddenStatesConnector
    return HiddenStatesConnector


def main() -> None:
    with open(sys.argv[1]) as file:
        case = json.load(file)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints belongs into the log
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    ids = {"eagle_aux_hidden_state_layer_ids": case["boundaries"]}
    llm = LLM(
        model=case["model"],
        dtype=case["dtype"],
        max_model_len=case["max_model_len"],
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": ids},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "eagle3_lib.engines.inside.vllm_tap",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": case["folder"]},
        },
        **case["engine_options"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": text} for text in json.loads(line)]
        paths = [o.kv_transfer_params["hidden_states_path"] for o in llm.generate(prompts, sampling, use_tqdm=False)]
        for path in paths:
            load_hidden_states(path)  # waits until it is written
        print(json.dumps(paths), file=replies, flush=True)


if __name__ == "__main__":
    main()
