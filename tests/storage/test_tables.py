"""Tables: the conversion of completions through JSON, compared with pyarrow's conversion of Python objects."""

from typing import cast
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.storage import tables
from bandpo_cli.storage.tables import EvalRow, eval_table
from tests.tasks.stored_completions import ROW

_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("task", "problem_id", "prompt", "reference", "grader", "extra", "text", "answer")]
    + [("reward", pa.float64()), ("accuracy", pa.float64()), ("verdict", pa.string()), ("length", pa.int32())]
    + [("finish_reason", pa.string()), ("logprob_sum", pa.float64())]
)  # fmt: skip
_VALUES = {
    pa.string(): st.text(max_size=20),
    pa.float64(): st.floats(),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
}
_NULLABLE = ("answer", "reward", "length", "finish_reason", "logprob_sum")
_ROWS = st.fixed_dictionaries(
    {item.name: (st.none() if item.name in _NULLABLE else st.nothing()) | _VALUES[item.type] for item in _SCHEMA}
)  # fmt: skip


@pytest.mark.slow
@given(st.lists(_ROWS, max_size=7))
def test_a_table_of_completions_equals_the_one_of_pyarrow(rows):
    """Any text, NaN and infinities included; blocks of three rows, so that there are up to three of them."""
    with mock.patch.object(tables, "_ROWS_PER_BLOCK", 3):
        found = eval_table(cast("list[EvalRow]", rows))
    expected = pa.Table.from_pylist(rows, schema=_SCHEMA)
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert repr(found.to_pylist()) == repr(expected.to_pylist())  # repr, because NaN is not equal to itself


@pytest.mark.parametrize(
    "value", [{"text": 5}, {"text": "\ud800"}, {"accuracy": "x"}, {"length": 2**31}, {"length": 1.5}, {"other": 1}]
)  # fmt: skip
def test_a_value_that_its_column_cannot_hold_is_an_error(value):
    with pytest.raises(ValueError, match=r"JSON|surrogates"):
        eval_table([cast("EvalRow", {**ROW, **value})])
