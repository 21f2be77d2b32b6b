"""Settings of the target service."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.config import WorkerConfig

# The wire's limit on the candidate tokens of one item.
WIRE_MAX_LOOKAHEAD = 64


class TargetConfig(WorkerConfig):
    """The target service: scores blocks with the large model."""

    model_config = SettingsConfigDict(cli_prog_name="python -m target_service")

    max_lookahead: int = Field(WIRE_MAX_LOOKAHEAD, ge=0, le=WIRE_MAX_LOOKAHEAD, description="longest block to score")
