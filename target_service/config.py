"""Settings of the target service."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.config import WorkerConfig
from outrider.net.bounds import MAX_LOOKAHEAD


class TargetConfig(WorkerConfig):
    """The target service: scores blocks with the large model."""

    model_config = SettingsConfigDict(cli_prog_name="python -m target_service")

    max_lookahead: int = Field(MAX_LOOKAHEAD, ge=0, le=MAX_LOOKAHEAD, description="longest block to score")
