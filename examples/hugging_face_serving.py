"""Continuous batching of Hugging Face on flash4_torch: requests of any lengths, keys and values in pages.

python examples/hugging_face_serving.py      (pip install transformers; psutil on a machine without a GPU)
"""

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import flash4_torch.integrations.transformers


def main() -> None:
    flash4_torch.integrations.transformers.register()
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=2, eos_token_id=None)).eval()
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)

    prompts = [torch.randint(3, 100, (length,)).tolist() for length in (5, 30, 12, 2)]
    model.set_attn_implementation("eager")
    alone = [
        model.generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]

    model.set_attn_implementation("fa4")
    pages = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=32)
    results = model.generate_batch(
        inputs=prompts, generation_config=greedy, continuous_batching_config=pages, progress_bar=False
    )
    together = [result.generated_tokens for result in results.values()]
    print(f"tokens of {len(together)} requests: {sum(map(len, together))}")
    print(f"the same tokens as one by one, by eager attention: {together == alone}")


if __name__ == "__main__":
    main()
