"""From logits to tokens: penalties, bias, filters, noise, log-probabilities.

Every choice for a row depends on that row, its request and its position alone, so a request gets the same tokens
alone, in any batch, on any rank. Shape letters: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.random import gumbel
from engine.request import Request

_NEVER = float("-inf")
_MIN_TEMPERATURE = 1e-5  # below it the draw is the most likely token anyway


@dataclass
class SampledLogprobs:
    """Log-probability of the chosen token of each row, its rank (1 = most likely), and the top k (ids, values)."""

    chosen: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def extend(self, more: SampledLogprobs) -> None:
        self.chosen += more.chosen
        self.ranks += more.ranks
        self.top_ids += more.top_ids
        self.top_logprobs += more.top_logprobs


class Sampler:
    """Samples the next token of each request; holds no state between steps."""

    def __init__(self, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device

    def __call__(self, logits_SV: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        """logits float32 [S, V], one row a request, at that request's last token. Returns int64 [S]."""
        if any(_shapes_logits(r) for r in requests):
            logits_SV = logits_SV.clone()
            for row_V, request in zip(logits_SV, requests, strict=True):
                self._apply_request(row_V, request)
        if all(r.params.greedy for r in requests):
            return logits_SV.argmax(-1)
        sampled_S = self._sample(logits_SV, requests)
        greedy_S = torch.tensor([r.params.greedy for r in requests], device=self.device)
        return torch.where(greedy_S, logits_SV.argmax(-1), sampled_S)

    def _apply_request(self, row_V: torch.Tensor, request: Request) -> None:
        """Bias, forbidden ends, then penalties (formulas of CTRL, Keskar et al. 2019, section 4.1, and the OpenAI API).

        The order is vLLM's: the repetition penalty scales a logit with its bias.
        """
        params = request.params
        output = self._ids(request.output_token_ids)
        if len(request.output_token_ids) < params.min_tokens and request.stop_token_ids:
            row_V[self._ids(sorted(request.stop_token_ids))] = _NEVER
        if params.logit_bias:
            row_V[self._ids(list(params.logit_bias))] += torch.tensor(
                list(params.logit_bias.values()), device=self.device
            )
        if params.repetition_penalty != 1.0:
            seen = torch.cat([self._ids(request.prompt_token_ids), output]).unique()
            values = row_V[seen]
            row_V[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if params.presence_penalty or params.frequency_penalty:
            seen, counts = output.unique(return_counts=True)
            row_V[seen] -= params.presence_penalty + params.frequency_penalty * counts.float()

    def _ids(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.device)

    def _sample(self, logits_SV: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        """Temperature, min_p, top_k, top_p, in vLLM's order, then one draw. The largest logit becomes 0 first, so that
        no temperature makes it overflow."""

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self.device).unsqueeze(1)

        params = [r.params for r in requests]
        logits_SV = logits_SV - logits_SV.amax(-1, keepdim=True)
        logits_SV = logits_SV / column([max(p.temperature or 1.0, _MIN_TEMPERATURE) for p in params])
        if any(p.min_p for p in params):
            floor_S1 = column([p.min_p for p in params]).log()
            logits_SV = logits_SV.masked_fill(logits_SV < floor_S1, _NEVER)
        if any(p.top_k or p.top_p < 1.0 for p in params):
            top_k_S = self._ids([min(p.top_k or self.vocab_size, self.vocab_size) for p in params])
            logits_SV = _filter_top(logits_SV, top_k_S, column([p.top_p for p in params]))
        noise_SV = gumbel(
            self._ids([r.seed for r in requests]), self._ids([r.num_tokens for r in requests]), self.vocab_size
        )
        return (logits_SV + noise_SV).argmax(-1)


def _shapes_logits(request: Request) -> bool:
    params = request.params
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or len(request.output_token_ids) < params.min_tokens
    )


def _filter_top(logits_SV: torch.Tensor, top_k_S: torch.Tensor, top_p_S1: torch.Tensor) -> torch.Tensor:
    """Keeps the k most likely tokens, then the fewest of them whose probabilities reach p; at least one stays."""
    values_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(values_SV.shape[1], device=values_SV.device)
    values_SV = values_SV.masked_fill(ranks_V >= top_k_S.unsqueeze(1), _NEVER)
    probs_SV = values_SV.softmax(-1)
    before_SV = probs_SV.cumsum(-1) - probs_SV
    drop_SV = (before_SV >= top_p_S1) & (ranks_V > 0) & (top_p_S1 < 1.0)
    values_SV = values_SV.masked_fill(drop_SV, _NEVER)
    return torch.empty_like(values_SV).scatter_(-1, order_SV, values_SV)


def gather_logprobs(logits_SV: torch.Tensor, token_ids_S: torch.Tensor, num_top: int) -> SampledLogprobs:
    """Log-probabilities under the raw logits. `num_top` may be 0."""
    logprobs_SV = logits_SV.log_softmax(-1)
    chosen_S1 = logprobs_SV.gather(1, token_ids_S.unsqueeze(1))
    ranks_S = (logprobs_SV > chosen_S1).sum(-1) + 1
    top = logprobs_SV.topk(num_top, dim=-1)
    return SampledLogprobs(chosen_S1[:, 0].tolist(), ranks_S.tolist(), top.indices.tolist(), top.values.tolist())
