"""Models as llama.cpp loads them: vocabulary, adapters, NextN blocks, trials of files."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.bindings.models.model import LoraFile, Model, rope_factor, watched_loading
    from specrun.bindings.models.model_checks import check_model, check_types
    from specrun.bindings.models.nextn import (
        NEXTN_ARCHITECTURES,
        ROLLBACK_ARCHITECTURES,
        NextnBlocks,
        nextn_tensors,
        read_nextn,
        split_headers,
    )
    from specrun.bindings.models.trial import (
        is_known_file,
        is_noted,
        note_fact,
        remember_written,
        require_tried_head,
        trust_folder,
        trusting_files,
    )
    from specrun.bindings.models.vocabulary import (
        STORED_KINDS,
        FillTokens,
        Vocabulary,
        stored_fingerprint,
    )

__getattr__, __dir__ = lazy_face(__name__)
