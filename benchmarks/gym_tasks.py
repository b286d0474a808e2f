"""Benchmark of the reasoning-gym task: time to make problems, verdicts on the references, answers graded per second.

    python benchmarks/gym_tasks.py [--size N] [--rounds N] [--workers N] [NAME ...]

For each generator (all usable ones by default), `--size` problems are made. Each reference must be graded as correct;
problems without a reference are counted. Then all references are graded `--rounds` times by running workers. Grades of
equal answers are shared within a call, so that each round is a call of its own.
"""

import time

from shared import command_line

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.config.task import ReasoningGymTask
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.tasks.reasoning_gym import ReasoningGym, describe_generators, generate


def main() -> None:
    """Run the benchmark and print its results."""
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--size", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.names or [*describe_generators()]
    seconds = {}
    for name in names:
        start = time.process_time()
        generate(name, {}, seed=0, size=arguments.size)
        seconds[name] = (time.process_time() - start) / arguments.size
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:8]
    print("CPU seconds per problem, slowest: " + ", ".join(f"{name} {seconds[name]:.2f}" for name in slowest))
    print(f"below 0.01 s: {sum(value < 0.01 for value in seconds.values())} of {len(names)}")
    task = ReasoningGym(ReasoningGymTask(names=tuple(names), heldout_size=arguments.size))
    problems = [problem for heldout_set in task.heldout_sets().values() for problem in heldout_set]
    graded = [problem for problem in problems if problem.answer]
    texts = [f"<answer>{problem.answer}</answer>" for problem in graded]
    with GraderPool(GradingConfig(workers=arguments.workers, deadline=60)) as pool:
        first = pool.grade(graded, texts)
        start = time.perf_counter()
        for _ in range(arguments.rounds):
            pool.grade(graded, texts)
        rate = arguments.rounds * len(graded) / (time.perf_counter() - start)
    wrong = {problem.source for problem, grade in zip(graded, first, strict=True) if not grade.correct}
    without = sorted({problem.source for problem in problems if not problem.answer})
    correct = sum(grade.correct for grade in first)
    print(f"references correct: {correct} of {len(graded)}; wrong: {wrong or 'none'}")
    print(f"generators without references: {', '.join(without)}")
    print(f"graded per second, {arguments.workers} workers: {rate:,.0f}")


if __name__ == "__main__":
    main()
