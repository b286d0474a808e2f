"""Engine of tests that samples one request after the other."""

from abc import abstractmethod
from collections.abc import Generator, Iterable, Sequence

from bandpo_cli.sampling.sampler import Sampler, SampleRequest, SamplingParams
from bandpo_cli.types import Completion


class SequentialSampler(Sampler):
    """A sampler whose `sample` defines the completions of a request."""

    @abstractmethod
    def sample(
        self, prompts_P: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[list[Completion]]: ...

    def sample_stream(
        self, requests: Iterable[SampleRequest | None], params: SamplingParams, in_order: bool = True
    ) -> Generator[tuple[int, list[list[Completion]]], None, None]:
        for number, request in enumerate(filter(None, requests)):
            yield number, self.sample(request.prompts_P, params, request.seed)
