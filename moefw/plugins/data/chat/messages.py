"""The keys of a message beside its role under which it may say something."""

from __future__ import annotations

from typing import Final

REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the standard one first."""
INSTEAD_OF_CONTENT: Final = ("tool_calls", "function_call", "tool_responses", *REASONING)
"""What a message may have without content."""
