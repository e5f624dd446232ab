"""Look-ahead positions in torch: embeddings behind every token of a text, and what is said there.

A group of L embeddings stands behind position t of a text: they have the positions t + 1 to t + L,
attend to the text up to t and to one another as a chain, and nothing attends to them. So the row of
the j-th (from 1) is where the target would say the token t + 1 + j, without having seen the j
tokens before it. That is how they are evaluated when they draft (`runtime/drafters/parallel`).

The text is computed first, its keys and values are kept, and all groups of a batch then attend to
them at once: a text of T tokens with G groups costs T + G L positions, not G texts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specrun.train.target.hf_model import HFModel

_NEVER = torch.finfo(torch.float32).min


class LookaheadEmbeddings(nn.Module):
    """`count` embeddings [count, h], one a look-ahead position; or one for all, SPACE's mask token.

    They begin as an average token of the target, `spread` apart, so that the layers read them as
    tokens from the first step on.
    """

    def __init__(self, embedding: Tensor, count: int, *, shared: bool) -> None:
        super().__init__()
        rows, spread = 1 if shared else count, embedding.float().std(0)
        self.count = count
        drawn = torch.randn(rows, embedding.shape[1], device=embedding.device)
        self.weight = nn.Parameter(embedding.float().mean(0) + 0.5 * spread * drawn)

    def rows(self) -> Tensor:
        """Return the embeddings of one group, [count, h]."""
        return self.weight.expand(self.count, -1)


def text_states(model: HFModel, ids: Tensor) -> tuple[Tensor, Any]:
    """Return the final states [B, T, h] of texts padded on the right, and their keys and values."""
    from transformers import DynamicCache

    cache = DynamicCache()
    found = model.model.base_model(input_ids=ids, use_cache=True, past_key_values=cache)
    return found.last_hidden_state, found.past_key_values


def lookahead_states(
    model: HFModel,
    cache: Any,  # noqa: ANN401 - transformers' own
    n_text: int,
    places: Tensor,
    embeddings: Tensor,
) -> Tensor:
    """Return the final states [B, G, L, h] of groups of embeddings [L, h] behind texts.

    `places` [B, G] are the positions t that groups stand behind; `cache` holds the keys and values
    of the texts' `n_text` positions, and afterwards those of the groups too.
    """
    batch, n_groups = places.shape
    length, width = embeddings.shape
    dtype = model.embedding.dtype
    inputs = embeddings.to(dtype).repeat(n_groups, 1).expand(batch, -1, width)
    steps = torch.arange(length, device=places.device)
    positions = (places[:, :, None] + 1 + steps).flatten(1)  # [B, G L]
    found = model.model.base_model(
        inputs_embeds=inputs,
        attention_mask=_mask(places, n_text, length).to(dtype),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    states: Tensor = found.last_hidden_state.unflatten(1, (n_groups, length))
    return states


def _mask(places: Tensor, n_text: int, length: int) -> Tensor:
    """Return the additive mask [B, 1, G L, T + G L]: the text up to t, a chain in each group."""
    batch, n_groups = places.shape
    device = places.device
    text = torch.arange(n_text, device=device) <= places[:, :, None]  # [B, G, T]
    text = text.repeat_interleave(length, 1)  # [B, G L, T]
    chain = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    same = torch.eye(n_groups, dtype=torch.bool, device=device)
    own = torch.kron(same.int(), chain.int()).bool().expand(batch, -1, -1)
    seen = torch.cat((text, own), -1)[:, None]
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, _NEVER)
