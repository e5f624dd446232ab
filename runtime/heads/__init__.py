"""Heads that read the target's hidden states: their files, and their graphs on ggml."""

from specrun.runtime.heads.file import (
    DEPTHS_KEY,
    KEY,
    TARGET_VOCABULARY,
    Accuracy,
    HeadFile,
    RankCounts,
    read_accuracy_csv,
    stored_accuracy,
)
from specrun.runtime.heads.graphs import (
    MOST_CHAIN_ROWS,
    MOST_DEPTHS,
    AttentionSizes,
    HeadWeights,
    KeyValueCache,
    LayerWeights,
    LengthGraphs,
    NativeShare,
    Places,
    RankedTokens,
    RowPlaces,
    add_ranking,
    chain_width,
    decoder_layer,
    fill_chain,
    fill_places,
    filled_width,
    layer_attention,
    layer_tensor_names,
    mask_below,
    ranked_tokens,
    tokens_by_rank,
)
from specrun.runtime.heads.states import FloatRows, RowPiece, TextRows
from specrun.runtime.heads.tree_graphs import (
    NamedChildren,
    PlannedTrees,
    ShapePlans,
    TreeGraphs,
    TreePlan,
)
