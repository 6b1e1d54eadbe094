"""A Hugging Face model on flash4_torch's attention: a small random Llama, padding on the left, greedy tokens.

python examples/hugging_face.py      (pip install transformers)
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flash4_torch.integrations.transformers
from flash4_torch.testing import backends_used


def main() -> None:
    flash4_torch.integrations.transformers.register()
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=2, pad_token_id=0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()

    prompts = torch.randint(3, 100, (2, 12))
    mask = torch.ones_like(prompts)
    mask[1, :5] = 0  # the second prompt is five tokens shorter
    logits, tokens = {}, {}
    with torch.no_grad(), backends_used() as used:
        for implementation in ("eager", "fa4"):
            model.set_attn_implementation(implementation)
            padded = {"input_ids": prompts, "attention_mask": mask}
            logits[implementation] = model(**padded).logits[mask.bool()]
            tokens[implementation] = model.generate(**padded, max_new_tokens=8, do_sample=False)

    print(f"largest difference of the logits: {(logits['eager'] - logits['fa4']).abs().max().item():.0e}")
    print(f"the same tokens: {torch.equal(tokens['eager'], tokens['fa4'])}")
    print(f"calls of flash4_torch's attention: {sum(used.values())}")


if __name__ == "__main__":
    main()
