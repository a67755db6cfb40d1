"""From logits to tokens: penalties, bias, filters, noise, log-probabilities.

Every choice for a row depends on that row, its request and its position alone, so a request gets the same tokens
alone, in any batch, on any rank. Shape letters: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from engine.kernels.random import gumbel
from engine.request import Request

_NEVER = float("-inf")
_FORBID_ROWS = 16  # at a time, which take some 2 MB each with a vocabulary of 163,840
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


@dataclass
class SamplingRows:
    """The parameters of requests whose logits are drawn from as they are: one tensor [S] each, on the device.

    temperature float32, 0 = greedy; top_k int32, 0 = all; top_p float32; log_min_p float32, -inf = none; seeds and
    places int64: the seed and the position of the token to be sampled, which key the noise.
    """

    NAMES: ClassVar = ("temperature", "top_k", "top_p", "log_min_p", "seeds", "places")

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    seeds: torch.Tensor
    places: torch.Tensor

    @staticmethod
    def fill(arrays: dict[str, np.ndarray], requests: list[Request]) -> None:
        """Writes all but `places` into the first rows of arrays of these names."""
        count, params = len(requests), [r.params for r in requests]
        arrays["temperature"][:count] = [0.0 if p.greedy else max(p.temperature, _MIN_TEMPERATURE) for p in params]
        arrays["top_k"][:count] = [min(p.top_k, 2**31 - 1) for p in params]
        arrays["top_p"][:count] = [p.top_p for p in params]
        with np.errstate(divide="ignore"):
            arrays["log_min_p"][:count] = np.log(np.array([p.min_p for p in params], dtype=np.float32))
        arrays["seeds"][:count] = [r.seed for r in requests]

    @classmethod
    def of(cls, requests: list[Request], places: np.ndarray, device: torch.device) -> SamplingRows:
        """A row for each of requests, which may repeat, with its place."""
        types = (np.float32, np.int32, np.float32, np.float32, np.int64, np.int64)
        arrays = {n: np.empty(len(requests), dtype=t) for n, t in zip(cls.NAMES, types, strict=True)}
        cls.fill(arrays, requests)
        arrays["places"][:] = places
        tensors = (torch.from_numpy(arrays[name]) for name in cls.NAMES)
        return cls(*(t if device.type == "cpu" else t.pin_memory().to(device, non_blocking=True) for t in tensors))


class LogitShaper:
    """Bias, early ends, then penalties (formulas of CTRL, Keskar et al. 2019, section 4.1, and the OpenAI API).

    The order is vLLM's: the repetition penalty scales a logit with its bias.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, logits_WV: torch.Tensor, request: Request, num_guesses: int = 0) -> None:
        """Changes in place the rows of a request's last token and of num_guesses guesses after it: each as if the
        guesses before it were the request's own tokens. Rows beyond are like the last one."""
        params = request.params
        prompt = self._ids(request.prompt_token_ids if params.repetition_penalty != 1.0 else []).unique()
        for index, row_V in enumerate(logits_WV):
            self._shape(row_V, request, prompt, request.guess_ids[: min(index, num_guesses)])

    def _shape(self, row_V: torch.Tensor, request: Request, prompt: torch.Tensor, guess_ids: list[int]) -> None:
        """prompt: its ids, each once."""
        params = request.params
        output = self._ids(request.output_token_ids + guess_ids)
        is_early = request.num_output_tokens + len(guess_ids) < params.min_tokens
        if is_early and request.stop_token_ids and params.structured_outputs is None:  # whose grammar knows its end
            row_V[self._ids(sorted(request.stop_token_ids))] = _NEVER
        if params.logit_bias:
            row_V[self._ids(list(params.logit_bias))] += torch.tensor(
                list(params.logit_bias.values()), device=self.device
            )
        if params.repetition_penalty != 1.0:
            seen = torch.cat([prompt, output]).unique()
            values = row_V[seen]
            row_V[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if params.presence_penalty or params.frequency_penalty:
            seen, counts = output.unique(return_counts=True)
            row_V[seen] -= params.presence_penalty + params.frequency_penalty * counts.float()

    def _ids(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.device)


def forbid(logits_MV: torch.Tensor, rows_R: torch.Tensor, masks_RB: torch.Tensor) -> None:
    """Sets logits to -inf in place, in rows_R (int64) of M, where bit i % 32 of int32 word i // 32 is 0 for token i."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits_MV.device)
    bytes_RB = masks_RB.view(torch.uint8)
    for rows, masks in zip(rows_R.split(_FORBID_ROWS), bytes_RB.split(_FORBID_ROWS), strict=True):
        is_forbidden = ((masks.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits_MV.shape[1]] == 0
        logits_MV[rows] = logits_MV[rows].masked_fill(is_forbidden, _NEVER)


def greedy(logits_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    """Writes each row's most likely token, the lowest id of equals, into the first rows of tokens_S. Returns the rows'
    maxima, float32 [S]."""
    tokens_S[: logits_SV.shape[0]] = logits_SV.argmax(-1)
    return logits_SV.amax(-1)


def draw(logits_SV: torch.Tensor, maxima_S: torch.Tensor, rows: SamplingRows, tokens_S: torch.Tensor) -> None:
    """Draws the token of every row of temperature above 0 into tokens_S: min_p, top_k, top_p, in vLLM's order, then
    one draw. The largest logit becomes 0 first, so that no temperature makes it overflow."""
    count, vocab_size = logits_SV.shape
    drawn_S = rows.temperature > 0
    scaled_SV = (logits_SV - maxima_S.unsqueeze(1)) / rows.temperature.masked_fill(~drawn_S, 1.0).unsqueeze(1)
    scaled_SV = scaled_SV.masked_fill(scaled_SV < rows.log_min_p.unsqueeze(1), _NEVER)
    if bool(((rows.top_k > 0) | (rows.top_p < 1.0)).any()):
        top_k_S = rows.top_k.masked_fill(rows.top_k == 0, vocab_size)
        scaled_SV = _filter_top(scaled_SV, top_k_S, rows.top_p.unsqueeze(1))
    chosen_S = (scaled_SV + gumbel(rows.seeds, rows.places, vocab_size)).argmax(-1)
    tokens_S[:count] = torch.where(drawn_S, chosen_S, tokens_S[:count])


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
