"""Our functions as a kernel of the Hugging Face Hub: what is written, and that it is loaded by its name."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from flash4_torch.integrations import hub
from flash4_torch.integrations.hub.__main__ import main


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub.write(tmp_path_factory.mktemp("kernels") / hub.NAME)


LOAD = """
import importlib.util, sys
sys.path.append(sys.argv[2])
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1] + "/__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules["kernel"] = kernel
spec.loader.exec_module(kernel)
import torch
x = torch.randn(1, 3, 2, 8)
assert torch.equal(kernel.flash_attn_func(x, x, x, causal=True)[:, 0], x[:, 0])
print(sys.modules["flash4_torch"].__file__)
"""


def test_a_kernel_brings_the_package_along(kernel: Path) -> None:
    """-S: packages that are installed for development are not found."""
    variant = kernel / "build" / "torch-cpu"
    command = [sys.executable, "-I", "-S", "-c", LOAD, str(variant), sysconfig.get_path("purelib")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == variant / "flash4_torch" / "__init__.py"


def test_a_kernel_has_a_variant_for_each_backend(kernel: Path) -> None:
    variants = {path.name: path for path in (kernel / "build").iterdir()}
    assert sorted(variants) == ["torch-cpu", "torch-cuda"]
    files = {name: sorted(p.relative_to(path) for p in path.rglob("*.py")) for name, path in variants.items()}
    assert files["torch-cpu"] == files["torch-cuda"]
    metadata = {name: json.loads((path / "metadata.json").read_text()) for name, path in variants.items()}
    assert len({about["id"] for about in metadata.values()}) == 2
    for name, about in metadata.items():
        assert f"torch-{about['backend']['type']}" == name and about["name"] == hub.NAME


def test_a_folder_that_is_there_is_not_written_to(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hub", str(kernel)])
    with pytest.raises(SystemExit, match="2"):
        main()


SERVE = """
import sys, torch, transformers as hf
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache
from transformers.utils.import_utils import is_kernels_available

if not is_kernels_available():
    sys.exit(77)
cache.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), 1 << 30, 0, 0)
sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
torch.manual_seed(0)
model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, initializer_range=0.3)).eval()
prompts = torch.randint(4, 40, (3, 9))
greedy = hf.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
wanted = model.generate(prompts, generation_config=greedy)
model.set_attn_implementation(sys.argv[1])
assert torch.equal(model.generate(prompts, generation_config=greedy), wanted)
batching = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=24)
results = model.generate_batch(
    inputs=prompts.tolist(), generation_config=greedy, continuous_batching_config=batching, progress_bar=False
)
assert [r.generated_tokens for r in results.values()] == wanted[:, 9:].tolist()
functions = hf.modeling_flash_attention_utils.lazy_import_flash_attention(sys.argv[1])[0][:3]
print(*{f.__module__.partition(".")[0] for f in functions})
"""


def has_kernels() -> bool:
    try:
        return bool(importlib.metadata.version("kernels"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not has_kernels(), reason="the package kernels is not installed (pip install kernels)")
def test_transformers_loads_a_kernel_by_its_name(kernel: Path) -> None:
    """The tokens of SDPA, alone and in a batch; in a process where no test has the name kernels."""
    name = f"flash4/{hub.NAME}"
    environment = {**os.environ, "LOCAL_KERNELS": f"{name}={kernel}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SERVE, name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 77:
        pytest.skip("this transformers takes other versions of the package kernels")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["flash4_torch"]
