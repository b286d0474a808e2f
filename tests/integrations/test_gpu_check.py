"""The check of TRL in `make gpu-check`, with small shapes on a CPU."""

import pytest

from scripts.gpu_check.engines import check_trl
from scripts.gpu_check.work import Work

pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_batch_of_trl_on_the_same_work_is_timed(tmp_path):
    measured = check_trl(Work("cpu", True, tmp_path))
    values = measured.values
    assert values["time_over_trl"] == pytest.approx(values["bandpo_s"] / values["trl_s"])
    assert values["trl_s"] > 0
    assert measured.shortfalls == []
