"""The tokens that a run recorded for its clip maps, read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bandpo_cli.errors import UserError
from bandpo_cli.paths import check_regular
from bandpo_cli.tracking.run_folder import step_of
from bandpo_cli.tracking.tables import TOKEN_COLUMNS


def read_tokens(folder: Path) -> dict[str, np.ndarray]:
    """Return the `TOKEN_COLUMNS` of every recorded step of the run in `folder`, one after the other, float64.

    Raises:
        UserError: there are none, or a file is damaged.
    """
    import pyarrow.parquet as pq

    paths = [path for path in sorted((folder / "tokens").glob("step-*.parquet")) if step_of(path) is not None]
    if not paths:
        raise UserError(
            f"{folder}: no recorded tokens there (tokens/step-*.parquet); evaluated steps have them"
        )
    columns: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_COLUMNS}
    for path in paths:
        check_regular(path, str(path))
        try:
            table = pq.read_table(path, columns=list(TOKEN_COLUMNS))
            for name in TOKEN_COLUMNS:
                columns[name].append(table[name].to_numpy().astype(np.float64))
        except Exception as error:  # noqa: BLE001 - of a damaged file pyarrow raises errors of any kind
            line = (str(error).splitlines() or [""])[0][:200]
            raise UserError(f"{path}: not readable as a table of tokens: {line}") from None
    return {name: np.concatenate(parts) for name, parts in columns.items()}
