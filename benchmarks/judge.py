"""Benchmark of asynchronous reward functions: the wait for the grades of one step by examples/judge.py.

    python benchmarks/judge.py [--answers 64] [--latency 0.5] [--concurrency 64]

A local server answers each call after `--latency` seconds. The first step includes the start of the worker.
"""

import asyncio
import os
import threading
import time

from shared import command_line

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem

REPLY = b'{"choices": [{"message": {"content": "Verdict: 5"}}]}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(REPLY)


def start_server(latency: float) -> int:
    """Start a server of chat completions in a thread and return its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readline() and await reader.readuntil(b"\r\n\r\n")).lower():
            await reader.readexactly(int(head.split(b"content-length:")[1].split()[0]))
            await asyncio.sleep(latency)
            writer.write(HEAD + REPLY)

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", backlog=1024))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return int(server.sockets[0].getsockname()[1])


def main() -> None:
    """Print the seconds until all grades of a step are there, for three steps."""
    parser = command_line(__doc__)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.5, help="seconds per call")
    parser.add_argument("--concurrency", type=int, default=64)
    options = parser.parse_args()
    os.environ["JUDGE_URL"] = f"http://127.0.0.1:{start_server(options.latency)}"
    problem = Problem("p", "1+1?", "2", "benchmark", "examples.judge:judge", {"question": "1+1?"})
    with GraderPool(GradingConfig(concurrency=options.concurrency, deadline=60)) as pool:
        for step in range(3):
            start = time.perf_counter()
            grades = pool.grade([problem] * options.answers, [str(n) for n in range(options.answers)])
            seconds = time.perf_counter() - start
            correct = sum(grade.correct for grade in grades)
            print(
                f"step {step}: {seconds:.2f} s for {correct} grades at {options.concurrency} calls at a time"
            )


if __name__ == "__main__":
    main()
