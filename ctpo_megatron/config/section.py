"""The base of all sections of a configuration, and types that they share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

LARGEST_SEED = 2**32 - 1
"""NumPy's limit, since vLLM seeds NumPy."""
LONGEST_S = 1e9
"""30 years; ten times as much exceeds the timeouts of Python and the system."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Precision = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
