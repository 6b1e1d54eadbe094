"""A program that runs SGLang's engine on a CPU, once for each line of JSON that it reads, and writes a line.

A line in has the keywords of `sglang.Engine` as "engine", token numbers as "prompts" (lists of them, one list
after another), "max_tokens", whether "logprobs" are wanted, and variables as "environment". The line out says
"tokens", "logprobs" and "cached" (tokens that the radix cache had) of each request, and "counts": steps of
each mode, how many mixed prefill with decoding, and how often requests had to start again; or it says the
error. Results go to the file that the command line names. An error in a process of SGLang's kills this one.

SGLang's own code for CPUs is torch's where its kernels for AMX are absent. What it imports at its top anyway
is replaced by names that do nothing: packages of GPU kernels, and torchvision.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils._triton
import transformers

_COMMON: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "flash4",
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "log_level": "warning",
}
ABSENT = ("sgl_kernel", "torchvision", "triton")


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Nothing(metaclass=_AnyName):
    """A name of an absent package; a decorator, too. It launches no kernel, for it has no `kernel[grid]`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def __call__(self, *args: Any, **more: Any) -> _Nothing:
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__version__="0", __getattr__=lambda name: getattr(_Nothing, name))


def _prepare() -> None:
    """Imports SGLang; its processes are then forks of this one, which need not import it again."""
    assert not transformers.utils.is_torchvision_available()
    torch.utils._triton.has_triton_package()
    sys.meta_path.append(_Finder())
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    import sglang.srt.models.llama
    import sglang.srt.models.registry  # noqa: F401
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from flash4_torch.integrations.sglang.backend import Flash4Backend

    multiprocessing.set_start_method("fork", force=True)
    for module in (multiprocessing, torch.multiprocessing):
        module.set_start_method = lambda *args, **more: None
    _watch(Flash4Backend, "_describe", lambda backend, batch, *rest: batch.forward_mode.name.lower())
    _watch(ScheduleBatch, "retract_decode", lambda *args: "retract")
    _watch(ScheduleBatch, "mix_with_running", lambda *args: "mixed")


def _watch(owner: Any, name: str, word: Callable[..., str]) -> None:
    """Counts calls of a method by a word, whichever process they are in."""
    method = getattr(owner, name)

    def watched(*args: Any, **more: Any) -> Any:
        with open(os.environ["COUNTS"], "a") as file:
            print(word(*args), file=file)
        return method(*args, **more)

    setattr(owner, name, watched)


def run(
    engine: dict[str, Any],
    prompts: list[list[list[int]]],
    max_tokens: int,
    logprobs: bool,
    environment: dict[str, str],
) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers import scheduler

    os.environ.update(environment)
    # SGLang has read this one when it was imported.
    scheduler.TEST_RETRACT = "SGLANG_TEST_RETRACT" in environment
    scheduler.TEST_RETRACT_INTERVAL = 10
    done: dict[str, Any] = {"tokens": [], "logprobs": [], "cached": []}
    llm = Engine(**_COMMON, **engine)
    try:
        for some in prompts:
            sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
            for result in llm.generate(input_ids=some, sampling_params=sampling, return_logprob=logprobs):
                about = result["meta_info"]
                done["tokens"].append(result["output_ids"])
                found = about.get("output_token_logprobs")
                done["logprobs"].append(found and [logprob for logprob, *_ in found])
                done["cached"].append(about["cached_tokens"])
        return done
    finally:
        for name in environment:
            del os.environ[name]
        llm.shutdown()


def main() -> None:
    _prepare()
    with open(sys.argv[1], "w") as results:
        for line in sys.stdin:
            with tempfile.NamedTemporaryFile("r") as counted:
                os.environ["COUNTS"] = counted.name
                try:
                    done = run(**json.loads(line))
                except Exception as error:
                    done = {"error": f"{type(error).__name__}: {error}"}
                done["counts"] = Counter(counted.read().split())
            print(json.dumps(done), file=results, flush=True)


if __name__ == "__main__":
    main()
