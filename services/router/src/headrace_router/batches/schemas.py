"""What clients send about batches."""

from pydantic import BaseModel, ConfigDict


class OutputLife(BaseModel):
    """When files with results are deleted."""

    model_config = ConfigDict(extra="allow", strict=True)

    anchor: str
    seconds: int


class BatchBody(BaseModel):
    """POST /v1/batches."""

    model_config = ConfigDict(extra="allow", strict=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputLife | None = None
