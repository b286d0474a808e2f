"""Settings of what a run leaves behind beside its folder (`tracking:` in a config file)."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from bandpo_cli.config.base import Section


class TrackingConfig(Section):
    """The MLflow mirror. The run folder is written whatever stands here."""

    mlflow: bool = True
    """Send metrics, params and files to MLflow as well."""

    uri: str | None = Field(None, min_length=1)
    """Where MLflow keeps its record: an http address or a database. null: what the environment's
    MLFLOW_TRACKING_URI says, and without one the SQLite file mlflow.db in the runs folder."""

    experiment: str = Field("bandpo", min_length=1, max_length=500)
    """The MLflow experiment that the run is filed under."""

    parent: str | None = Field(None, min_length=1)
    """The MLflow run that this one is shown under: a sweep's. Set by the sweep."""

    @field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        """A run's config.yaml is copied, shared and uploaded, so no password belongs in it."""
        if uri is not None and re.search(r"://[^/@]*:[^/@]*@", uri):
            raise ValueError(
                "it holds a password, which the run folder would keep; set MLFLOW_TRACKING_URI instead"
            )
        return uri
