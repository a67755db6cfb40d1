"""Token counts, the same in streams and single answers.

`completion_tokens` counts every id the model generated, the end token included, over all choices. `prompt_tokens`
counts each prompt once, and `cached_tokens` what no answer to it had to compute: where n answers share a prompt, those
after the first find it computed. They are known with the first token. `reasoning_tokens` runs up to and including
`</think>`. The prediction tokens are the draft model's guesses that were verified, over all choices; a choice's are
known when it ends. Accepted ones are also among `completion_tokens`, rejected ones are not: nobody asked for them.
"""

from __future__ import annotations

from typing import Any

from engine.request import CompletionDelta


class UsageCounter:
    def __init__(self, num_prompt_tokens: int):
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._cached: dict[str, int] = {}

    def push(self, delta: CompletionDelta) -> None:
        self.num_completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None:
            seen = self._cached.get(delta.request_id, delta.num_cached_tokens)
            self._cached[delta.request_id] = min(seen, delta.num_cached_tokens)
        if delta.metrics is not None:
            self.num_draft_tokens += delta.metrics.num_draft_tokens
            self.num_accepted_tokens += delta.metrics.num_accepted_tokens

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": self.num_reasoning_tokens,
                "accepted_prediction_tokens": self.num_accepted_tokens,
                "rejected_prediction_tokens": self.num_draft_tokens - self.num_accepted_tokens,
            },
        }
