"""A drafter trained on one answer until every draft is right: the replay and the real vLLM accept all K of each round."""

import torch

from eagle3_lib.drafter import checkpoint
from eagle3_lib.engines import base
from eagle3_lib.engines.vllm import server as vllm
from eagle3_lib.features.store import Sample, Writer
from eagle3_lib.params import BASE_DRAFTER, BenchmarkParams, TrainParams
from eagle3_lib.stages import train
from eagle3_lib.targets import capture, targets

QUESTION, TOKENS, STEPS = "Explain why people sleep.", 31, 4


def test_overfitting_one_answer_is_accepted_whole_by_the_engine(target, target_folder, tokenizer, tmp_path):
    prompt = targets.render(tokenizer, [{"role": "user", "content": QUESTION}])
    ids = target.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    boundaries = checkpoint.load_for(BASE_DRAFTER, targets.SMOLLM2, target).config.boundaries
    (features,) = capture.capture(target, [ids], boundaries)
    writer = Writer(tmp_path / "features", {"target": targets.SMOLLM2, "boundaries": list(boundaries)})
    writer.add_shard(0, [Sample("sleep", "train", len(prompt), ids, features)], torch.float32)

    params = TrainParams(
        out=str(tmp_path / "train"), features=str(tmp_path / "features"), overfit=True, ttt_steps=STEPS
    )
    constant = {"learning_rate": 1.0e-3, "schedule": "constant", "epochs": 300, "evaluate_every": 5}
    last = train.run(params.model_copy(update=constant))["evaluations"][-1]
    assert last["curve"]["value"] == [1.0] * STEPS and last["mean_length"]["value"] == STEPS + 1

    drafter = str(tmp_path / "train" / "drafter")
    serving = BenchmarkParams(mode="overfit", drafter=drafter, max_model_len=256)
    with vllm.serve(
        serving, target_folder, tmp_path / "server.log", base.Speculation("overfit", drafter, STEPS)
    ) as server:
        answer = base.complete(server, prompt, TOKENS)
    assert answer.output_ids == ids[len(prompt) :]
    assert answer.accepted[:-1] == [STEPS] * (len(answer.accepted) - 1) and len(answer.accepted) == TOKENS // (
        STEPS + 1
    )
