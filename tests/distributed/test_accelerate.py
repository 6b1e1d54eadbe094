"""Hugging Face accelerate's ParallelismConfig(cp_size=2): torch divides sequences, and our ring attends.

accelerate is no dependency of the tests: they skip where it is missing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import flash4_torch
from flash4_torch.distributed import parallelize_attention, unshard_sequence
from ranks import Ranks
from test_modules import HF_SIZES, S, tokens

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Ranks of their own: accelerate keeps state in the process."""
    own = Ranks(2)
    yield own
    own.stop()


def model() -> Any:
    flash4_torch.integrations.transformers.register()
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**HF_SIZES), attn_implementation="fa4")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def step_of_ranks(port: int) -> list[Tensor]:
    """Logits, and parameters after a step."""
    rank = str(torch.distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator, PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    # accelerate takes a ParallelismConfig for GPUs only; nothing in it needs one.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2), fsdp_plugin=fsdp)
    llama = model()
    shared, optimizer = accelerator.prepare(llama, torch.optim.SGD(llama.parameters(), lr=1.0))
    mesh = accelerator.torch_device_mesh["cp"]
    assert len(parallelize_attention(shared, mesh)) == 2
    ids, positions = tokens(), torch.arange(S).repeat(len(tokens()), 1)
    buffers = [ids, positions, torch.ones_like(ids)]
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
    ):
        names = ("input_ids", "position_ids", "attention_mask")
        logits = shared(**dict(zip(names, buffers, strict=True)), use_cache=False).logits
        accelerator.backward(logits.sin().square().mean())
        optimizer.step()
    return [unshard_sequence(logits, mesh), *(p.detach().full_tensor() for p in shared.parameters())]


def test_a_step_equals_that_of_one_process(pair: Ranks) -> None:
    llama = model()
    optimizer = torch.optim.SGD(llama.parameters(), lr=1.0)
    logits = llama(tokens(), use_cache=False).logits
    logits.sin().square().mean().backward()
    optimizer.step()
    for found in pair.run(step_of_ranks, free_port()):
        for mine, right in zip(found, [logits.detach(), *llama.parameters()], strict=True):
            torch.testing.assert_close(mine, right.detach(), rtol=1e-4, atol=1e-5)
