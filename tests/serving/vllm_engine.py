"""A program that runs vLLM's engine on a CPU, once for each line of JSON that it reads, and writes a line.

A line in has the keywords of `vllm.LLM` as "engine", token numbers as "prompts", "max_tokens", and perhaps
variables as "environment". The line out says "tokens" and "logprobs" of each request, how many requests were
preempted, how many steps there were, and how many of them mixed prefill with decoding; or it says the error.
Results go to the file that the command line names.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.sched.scheduler import Scheduler

from flash4_torch.integrations.vllm import registered_name
from flash4_torch.integrations.vllm.metadata import Flash4MetadataBuilder

_COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "compilation_config": {"custom_ops": ["none"]},
    "disable_log_stats": True,
}


class _Watched:
    """What happened in the engine since the last `take`."""

    def __init__(self) -> None:
        self.preemptions = self.mixed = self.steps = 0
        preempt, build = Scheduler._preempt_request, Flash4MetadataBuilder.build

        def counted(scheduler: Any, *args: Any, **more: Any) -> Any:
            self.preemptions += 1
            return preempt(scheduler, *args, **more)

        def looked_at(builder: Any, *args: Any, **more: Any) -> Any:
            metadata = build(builder, *args, **more)
            lengths = metadata.query_start_loc.diff().tolist()
            self.steps += 1
            self.mixed += 1 in lengths and max(lengths) > 1
            return metadata

        Scheduler._preempt_request = counted
        Flash4MetadataBuilder.build = looked_at

    def take(self) -> dict[str, int]:
        seen = {"preemptions": self.preemptions, "mixed": self.mixed, "steps": self.steps}
        self.preemptions = self.mixed = self.steps = 0
        return seen


def run(
    engine: dict[str, Any], prompts: list[list[int]], max_tokens: int, environment: dict[str, str]
) -> dict[str, Any]:
    os.environ.update(environment)
    llm = LLM(**_COMMON, attention_backend=registered_name(), **engine)
    try:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, logprobs=0, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = [result.outputs[0] for result in llm.generate(requests, sampling, use_tqdm=False)]
        tokens = [list(result.token_ids) for result in results]
        logprobs = [
            [at[token].logprob for at, token in zip(result.logprobs, result.token_ids, strict=True)]
            for result in results
        ]
        return {"tokens": tokens, "logprobs": logprobs}
    finally:
        for name in environment:
            del os.environ[name]
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def main() -> None:
    watched = _Watched()
    with open(sys.argv[1], "w") as results:
        for line in sys.stdin:
            try:
                done = run(**json.loads(line)) | watched.take()
            except Exception as error:
                done = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(done), file=results, flush=True)


if __name__ == "__main__":
    main()
