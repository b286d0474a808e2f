"""Time of a weight sync with the engine process (`sampling.max_lag: 1`), in GB/s, beside a plain copy in memory.

    python benchmarks/weight_sync.py [--syncs 7] [--engine transformers|vllm] [KEY=VALUE ...]

The model has random weights: 231 million parameters in bfloat16, 0.46 GB. A sync is all of `EngineProcess.sync`: the
weights of the trainer are in the engine, and checked, when it returns. Each sync is followed by a copy of the same
weights within this process, with one thread as the trainer has on two cores, so that a busy machine slows both. The
processor time of both processes depends less on what else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.models.load import embedded_model_path, load_policy
from bandpo_cli.sampling.engine_process import EngineProcess

SHAPE = {
    "vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip


def save_model(folder: Path) -> None:
    """Write a model with random weights and the tokenizer of the bundled model."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    config = Qwen2Config(**SHAPE, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id)
    torch.set_default_dtype(torch.bfloat16)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    tokenizer.save_pretrained(folder)


def seconds(action: Callable[[], object]) -> float:
    """Return the time of a call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def processor_seconds(process: int) -> float:
    """Return the processor time that a process has used, from Linux's /proc."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_gigabytes(process: int) -> float:
    """Return the memory of a process without that which it shares with others, from Linux's /proc."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024 / 1e9


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--syncs", type=int, default=7)
    parser.add_argument("--engine", default="transformers")
    options = parser.parse_args()
    torch.set_num_threads(2)  # one of which the engine process gets
    with tempfile.TemporaryDirectory(prefix="bandpo-weight-sync-") as folder:
        save_model(Path(folder))
        sampling = {"engine": options.engine, "max_lag": 1, "max_tokens": 32, "max_prompt_tokens": 96}
        vllm = {"kv_cache_gb": 0.25, "eager": True}
        own = {
            "model": {"path": folder, "device": "cpu", "dtype": "bfloat16"},
            "sampling": {**sampling, "vllm": vllm},
        }
        config = resolve([own, read_assignments(options.settings)])
        policy = load_policy(config.model)
        weights = [parameter.detach() for parameter in policy.model.parameters()]
        copies = [torch.empty_like(weight) for weight in weights]
        gigabytes = sum(weight.nbytes for weight in weights) / 1e9
        engine = EngineProcess(config, policy)
        try:
            syncs, plain, used = [], [], 0.0
            child: Any = engine._child
            for version in range(1, options.syncs + 1):
                before = time.process_time() + processor_seconds(child.pid)
                syncs.append(seconds(lambda version=version: engine.sync(policy.model, version)))
                used += time.process_time() + processor_seconds(child.pid) - before
                plain.append(seconds(lambda: torch._foreach_copy_(copies, weights)))
            resident = resident_gigabytes(child.pid)
        finally:
            engine.close()
    rates = [gigabytes / each for each in syncs]
    result = {
        "engine": options.engine,
        "gigabytes": round(gigabytes, 3),
        "engine_process_gb": round(resident, 2),
        "sync_s": round(statistics.median(syncs), 3),
        "processor_s_per_sync": round(used / len(syncs), 3),
        "sync_gb_per_s": round(statistics.median(rates), 2),
        "sync_gb_per_s_range": [round(min(rates), 2), round(max(rates), 2)],
        "copy_gb_per_s": round(gigabytes / statistics.median(plain), 2),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
