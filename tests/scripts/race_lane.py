"""A stand-in for the pipe between `make gpu-check` and one side of its race."""


class RecordingLane:
    """Records what a side reports and lets it train without a pause.

    Attributes:
        waits: the answer of each wait.
        phases: per step the seconds of its phases.
    """

    def __init__(self) -> None:
        self.waits: list[object] = []
        self.phases: list[dict[str, float]] = []

    def wait(self, answer: object = None) -> None:
        self.waits.append(answer)

    def end_step(self, phases: dict[str, float]) -> None:
        self.phases.append(phases)
