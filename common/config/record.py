"""Base class and types of all configuration records."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


class ConfigRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
