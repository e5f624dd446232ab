"""Heads that read the target's hidden states: their files, and their graphs on ggml."""

from specrun.runtime.heads.attention import (
    AttentionSizes,
    KeyValueCache,
    LayerWeights,
    Places,
    RowPlaces,
    decoder_layer,
    fill_chain,
    fill_places,
    layer_attention,
    layer_tensor_names,
    mask_below,
)
from specrun.runtime.heads.graphs import (
    MOST_CHAIN_ROWS,
    MOST_CHAIN_TOKENS,
    ChainGraphs,
    ChainTokens,
    LengthGraphs,
    NativeShare,
    PossibleGraphs,
    RankedTokens,
    add_ranking,
    chain_width,
    filled_width,
    ranked_tokens,
    tokens_by_rank,
)
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.heads.node_accuracy import (
    DEPTHS_KEY,
    KEY,
    Accuracy,
    RankCounts,
    read_accuracy_csv,
    stored_accuracy,
)
from specrun.runtime.heads.text_rows import FloatRows, RowPiece, TextRows
from specrun.runtime.heads.tree_graphs import NamedChildren, PlannedTrees, TreeGraphs, TreePlan
